"""Declaring the sections that operations refer to; a section's bytes are made only when it is written."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from oasis_cli.compiler.layer import LayerTables, streamed_indices
from oasis_cli.compiler.source import QuantizedFolder
from oasis_cli.formats.image import SectionDraft
from oasis_cli.formats.image_table import SectionKind, SectionType
from oasis_cli.formats.packing import packed_length
from oasis_cli.formats.program import NO_SECTION, ModelShape, Opcode, Operation

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
_TYPES: Final = {
    torch.uint8: SectionType.U8,
    torch.int16: SectionType.I16,
    torch.float16: SectionType.F16,
    torch.bfloat16: SectionType.BF16,
    torch.float32: SectionType.F32,
}


@dataclass
class Binder:
    """Declares the sections that operations refer to, in the order in which the program needs them."""

    source: QuantizedFolder
    shape: ModelShape
    lines: int
    tables: Mapping[str, LayerTables]
    frequencies: Tensor
    rope_scaling: float
    drafts: list[SectionDraft] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)

    def reserve(self, name: str) -> None:
        """Keep the next place in the table for a section that is made last."""
        self._index[name] = len(self._index)

    def bind(self, op: Operation) -> Operation:
        """The operation with its section references and its immediate."""
        binders: dict[Opcode, Callable[[Operation], Operation]] = {
            Opcode.EMBED: self._bind_embed,
            Opcode.NORM: self._bind_norm,
            Opcode.QUANTIZE: self._bind_quantize,
            Opcode.LUT_GEMM: self._bind_lut_gemm,
            Opcode.DENSE_GEMM: self._bind_dense_gemm,
            Opcode.ROPE: self._bind_rope,
        }
        return binders[op.opcode](op) if op.opcode in binders else op

    def _bind_embed(self, op: Operation) -> Operation:
        return replace(op, sections=(self._dense(f"{op.name}.weight", (op.K, op.N)),))

    def _bind_norm(self, op: Operation) -> Operation:
        weight = self._dense(f"{op.name}.weight", (op.N,))
        return replace(op, sections=(weight, NO_SECTION), immediate=float(self.source.config.rms_norm_eps))

    def _bind_rope(self, op: Operation) -> Operation:
        name = "rope.inverse_frequencies"
        section = self._small(name, SectionKind.FREQUENCIES, self.frequencies)
        return replace(op, sections=(section,), immediate=self.rope_scaling)

    def _bind_quantize(self, op: Operation) -> Operation:
        layer = next(name for name, entry in self.source.spec.layers.items() if entry.site == op.name)
        site = self.tables[layer].site
        codebook = self._small(f"{op.name}.act_codebook", SectionKind.CODEBOOK, site.codebook)
        bounds = self._small(f"{op.name}.boundaries", SectionKind.BOUNDARIES, site.boundaries)
        thresholds = NO_SECTION
        if site.thresholds is not None:
            thresholds = self._small(f"{op.name}.thresholds", SectionKind.THRESHOLDS, site.thresholds)
        return replace(op, sections=(codebook, bounds, thresholds))

    def _bind_lut_gemm(self, op: Operation) -> Operation:
        name, tables = op.name, self.tables[op.name]
        shape = (op.N, packed_length(op.K))
        sections = (
            self._add(
                f"{name}.indices",
                SectionKind.INDICES,
                torch.uint8,
                shape,
                lambda: streamed_indices(self.source, name, self.lines),
            ),
            self._small(f"{name}.lut", SectionKind.LUT, tables.lut.entries),
            self._small(f"{name}.weight_codebook", SectionKind.CODEBOOK, tables.codebook),
            self._stored(f"{name}.weight_scale", SectionKind.SCALES, torch.float16, (op.N,)),
            self._bias(op),
        )
        return replace(op, sections=sections, immediate=tables.lut.step)

    def _bind_dense_gemm(self, op: Operation) -> Operation:
        weight = f"{op.name}.weight"
        if weight == HEAD and self.shape.tied:
            weight = EMBEDDING
        return replace(op, sections=(self._dense(weight, (op.N, op.K)), self._bias(op)))

    def _bias(self, op: Operation) -> int:
        if not op.bias:
            return NO_SECTION
        name = f"{op.name}.bias"
        return self._stored(name, SectionKind.BIAS, self.source.declare(name, (op.N,)), (op.N,))

    def _dense(self, name: str, shape: tuple[int, ...]) -> int:
        return self._stored(name, SectionKind.DENSE, self.source.declare(name, shape), shape)

    def _stored(self, name: str, kind: SectionKind, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        return self._add(name, kind, dtype, shape, lambda: map(_to_bytes, self.source.rows(name)))

    def _small(self, name: str, kind: SectionKind, tensor: Tensor) -> int:
        return self._add(name, kind, tensor.dtype, tuple(tensor.shape), lambda: (_to_bytes(tensor),))

    def _add(
        self,
        name: str,
        kind: SectionKind,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        chunks: Callable[[], Iterable[bytes]],
    ) -> int:
        if name not in self._index:
            self._index[name] = len(self._index)
            self.drafts.append(SectionDraft(name, kind, _TYPES[dtype], shape, chunks))
        return self._index[name]


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
