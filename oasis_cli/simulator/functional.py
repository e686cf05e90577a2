"""The bit-true simulator: it walks an image's program and computes what the accelerator would.

It reads nothing but the image and shares no arithmetic with the reference GEMM; that the two agree is the proof.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from oasis_cli.errors import InputError
from oasis_cli.formats.image import open_image
from oasis_cli.formats.image_table import SectionType
from oasis_cli.formats.packing import unpack_indices
from oasis_cli.formats.program import NO_SECTION, RULES, Opcode, Operation
from oasis_cli.formats.weight_order import channel_order
from oasis_cli.numerics.scale import ScaleKind, token_scale
from oasis_cli.progress import SILENT, Progress
from oasis_cli.simulator.units import functional_unit
from oasis_cli.simulator.units.clustering import cluster
from oasis_cli.simulator.units.error_compensation import compensate, residuals
from oasis_cli.simulator.units.orizuru import search_outliers, sort_outliers
from oasis_cli.simulator.units.outlier_set import OutlierSet, beyond_thresholds
from oasis_cli.simulator.units.pe_line import GEMMS, Engine, half_precision_gemm

Precision = Literal["fp32", "fp16"]
Observer = Callable[[Operation, dict[str, Tensor]], None]
_SUPPORTED_VARIANTS: Final = {Opcode.NORM: ("rms",), Opcode.GLU: ("silu",)}


@dataclass(frozen=True)
class QuantizedTokens:
    """What QUANTIZE leaves in its register: a site's activations as both branches take them.

    Attributes:
        index: i, uint8 [T, K].
        scale: s_t, float32 [T].
        outliers: channels to be compensated.
        residual: r, float32 [T, P], of those channels.
    """

    index: Tensor
    scale: Tensor
    outliers: OutlierSet
    residual: Tensor


Value = Tensor | QuantizedTokens


class FunctionalSimulator:
    """An image, ready to run.

    Args:
        image: a compiled folder or a `model.oimg`; every checksum is compared before anything is computed.
        engine: how the PE lines' sums are found: "counted" as the hardware does, by counting concatenated indices and
            by tournament trees, or "gathered", many times faster for whole windows. Both give the same bits.
        observer: called after each operation with its inputs and outputs by name.
        buffers: "fp16" rounds every tensor that is stored between operations, as the accelerator's buffers do.
        accumulate: "fp16" sums in the paper's FP16 MAC trees; with the counted engine only.
        progress: told of the checks.

    Attributes:
        metadata: what the image says of the model.
        operations: its program.

    Raises:
        InputError: the image is damaged, or its program holds what this simulator does not know.
        ValueError: unknown engine or precision.
    """

    def __init__(
        self,
        image: str | Path,
        engine: Engine = "counted",
        observer: Observer | None = None,
        buffers: Precision = "fp32",
        accumulate: Precision = "fp32",
        progress: Progress = SILENT,
    ) -> None:
        if engine not in GEMMS or not {buffers, accumulate} <= {"fp32", "fp16"}:
            raise ValueError(f"engine must be counted or gathered, the others fp32 or fp16; got {engine}, {buffers}")
        if accumulate == "fp16" and engine != "counted":
            raise ValueError("only the counted engine sums as the MAC trees do")
        self._image = open_image(image, verify=True, progress=progress)
        self.metadata = self._image.metadata()
        self.operations = self._image.program()
        self.engine: Engine = engine
        self.observer = observer
        self.buffers = buffers
        self.accumulate = accumulate
        self._execute: dict[Opcode, Callable[[Operation, dict[int, Value]], Value]] = {
            Opcode.NORM: self._norm,
            Opcode.QUANTIZE: self._quantize,
            Opcode.LUT_GEMM: self._lut_gemm,
            Opcode.DENSE_GEMM: self._dense_gemm,
            Opcode.ROPE: self._rope,
            Opcode.ATTENTION: self._attention,
            Opcode.GLU: self._glu,
            Opcode.ADD: self._add,
        }
        self._check_variants()

    def _check_variants(self) -> None:
        for op in self.operations:
            known = _SUPPORTED_VARIANTS.get(op.opcode, RULES[op.opcode].variants or ("",))
            if op.variant not in known:
                raise InputError(
                    f"{self._image.path}: {op.name} is of kind {op.variant!r}, the functional simulator knows "
                    f"{', '.join(known)}; compile another model"
                )

    @torch.no_grad()
    def logits(self, tokens: Tensor, progress: Progress = SILENT) -> Tensor:
        """Logits of one window.

        Args:
            tokens: int64 [1, T], T at least 1.
            progress: told of every operation.

        Returns:
            float32 [1, T, vocabulary].

        Raises:
            ValueError: another shape or type, or a token that the vocabulary lacks.
            InputError: the window is longer than the model attends to.
        """
        self._check_tokens(tokens)
        registers: dict[int, Value] = {}
        with progress.task("simulating", len(self.operations), "operations") as task:
            for op in self.operations:
                registers[op.destination] = self.execute(op, registers, tokens)
                task.advance()
        return _values(registers[self.operations[-1].destination])

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 1:
            raise ValueError(f"tokens must be int64 [1, T], got {tokens.dtype} {list(tokens.shape)}")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.metadata.shape.vocab:
            raise ValueError(f"tokens must lie in 0..{self.metadata.shape.vocab - 1}")
        window = self.metadata.attention_window
        if window is not None and tokens.shape[1] > window:
            raise InputError(
                f"{self._image.path}: a window of {tokens.shape[1]} tokens exceeds the model's sliding attention of "
                f"{window}; use shorter windows"
            )

    @torch.no_grad()
    def execute(self, op: Operation, registers: dict[int, Value], tokens: Tensor) -> Value:
        """Run one operation of the program; `registers` is read, not written.

        Args:
            op: one of `operations`.
            registers: what earlier operations left.
            tokens: int64 [1, T], read by EMBED only.

        Returns:
            What belongs into the operation's destination register.
        """
        result = self._embed(op, tokens) if op.opcode is Opcode.EMBED else self._execute[op.opcode](op, registers)
        if self.buffers == "fp16" and isinstance(result, Tensor):
            result = result.half().float()
        if self.observer is not None:
            self.observer(op, _observed(op, registers, tokens, result))
        return result

    def _embed(self, op: Operation, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._section(op, "table")).float()

    def _norm(self, op: Operation, registers: dict[int, Value]) -> Value:
        (x,) = _read(op, registers)
        return functional_unit.rms_norm(x, self._float(op, "weight"), op.immediate)

    def _rope(self, op: Operation, registers: dict[int, Value]) -> Value:
        (x,) = _read(op, registers)
        return functional_unit.rotate(x, self._section(op, "inverse_frequencies"), op.immediate, op.head_dim)

    def _attention(self, op: Operation, registers: dict[int, Value]) -> Value:
        query, key, value = _read(op, registers)
        return functional_unit.attend(query, key, value, op.head_dim, op.immediate)

    def _glu(self, op: Operation, registers: dict[int, Value]) -> Value:
        gate, *up = _read(op, registers)
        return functional_unit.gate(gate, up[0] if up else None)

    def _add(self, op: Operation, registers: dict[int, Value]) -> Value:
        residual, update = _read(op, registers)
        return residual + update

    def _dense_gemm(self, op: Operation, registers: dict[int, Value]) -> Value:
        (x,) = _read(op, registers)
        return F.linear(x, self._float(op, "weight"), self._float(op, "bias") if op.bias else None)

    def _quantize(self, op: Operation, registers: dict[int, Value]) -> Value:
        (x,) = _read(op, registers)
        x = x[0]
        scale = token_scale(x, cast(ScaleKind, op.variant), op.outliers)
        index = cluster(x, scale, self._section(op, "boundaries"))
        outliers = self._find_outliers(op, x)
        residual = residuals(x, scale, index, self._section(op, "codebook"), outliers)
        return QuantizedTokens(index, scale, outliers, residual)

    def _find_outliers(self, op: Operation, x: Tensor) -> OutlierSet:
        if _reference(op, "thresholds") != NO_SECTION:
            return beyond_thresholds(x, self._section(op, "thresholds"))
        search = search_outliers if self.engine == "counted" else sort_outliers
        return search(x, op.outliers).outliers()

    def _lut_gemm(self, op: Operation, registers: dict[int, Value]) -> Value:
        act = registers[op.sources[0]]
        if not isinstance(act, QuantizedTokens):
            raise ValueError(f"{op.name}: register {op.sources[0]} holds no quantized tokens")
        weight_index = self._weight_index(op)
        # each step is rounded once to float32, in this order
        main = self._main_branch(op, act.index, weight_index).float()
        compensation = compensate(act.residual, act.outliers, weight_index, self._section(op, "codebook"))
        y = (act.scale[:, None] * main + compensation) * self._float(op, "scales")
        if op.bias:
            y = y + self._float(op, "bias")
        return y[None]

    def _main_branch(self, op: Operation, act_index: Tensor, weight_index: Tensor) -> Tensor:
        lut = self._section(op, "lut").view(1 << op.act_bits, 1 << op.weight_bits)
        if self.accumulate == "fp16":
            entries = (lut.double() * op.immediate).half()
            inputs = self.metadata.target.mac_tree_inputs
            return half_precision_gemm(act_index, weight_index, entries, inputs)
        return GEMMS[self.engine](act_index, weight_index, lut) * op.immediate

    def _weight_index(self, op: Operation) -> Tensor:
        """The layer's indices, uint8 [N, K], out of the order in which the PE lines stream them."""
        stream = self._section(op, "indices")
        order = torch.from_numpy(channel_order(op.N, self.metadata.target.pe_lines))
        return unpack_indices(stream[order], op.K)

    def _section(self, op: Operation, role: str) -> Tensor:
        section = self._image.sections[_reference(op, role)]
        tensor = torch.from_numpy(self._image.array(section))
        return tensor.view(torch.bfloat16) if section.dtype is SectionType.BF16 else tensor

    def _float(self, op: Operation, role: str) -> Tensor:
        return self._section(op, role).float()


def _reference(op: Operation, role: str) -> int:
    return op.sections[RULES[op.opcode].sections.index(role)]


def _values(value: Value) -> Tensor:
    if isinstance(value, QuantizedTokens):
        raise ValueError("the register holds quantized tokens")
    return value


def _read(op: Operation, registers: dict[int, Value]) -> tuple[Tensor, ...]:
    return tuple(_values(registers[source]) for source in op.sources)


_INPUT_NAMES: Final = {
    Opcode.EMBED: (),
    Opcode.ATTENTION: ("query", "key", "value"),
    Opcode.GLU: ("gate", "up"),
    Opcode.ADD: ("residual", "input"),
}


def _observed(op: Operation, registers: dict[int, Value], tokens: Tensor, result: Value) -> dict[str, Tensor]:
    """Inputs and output of an operation by name."""
    seen = {"tokens": tokens} if op.opcode is Opcode.EMBED else {}
    for name, source in zip(_INPUT_NAMES.get(op.opcode, ("input",)), op.sources, strict=False):
        seen |= _named(name, registers[source], op.K)
    return seen | _named("output", result, op.K)


def _named(name: str, value: Value, K: int) -> dict[str, Any]:
    """A tensor under its name; quantized tokens in four parts."""
    if isinstance(value, Tensor):
        return {name: value}
    dense = torch.zeros(len(value.index), K).scatter_add_(1, value.outliers.channels, value.residual)
    return {
        f"{name}.index": value.index,
        f"{name}.scale": value.scale,
        f"{name}.outliers": value.outliers.mask(K),
        f"{name}.residual": dense,
    }
