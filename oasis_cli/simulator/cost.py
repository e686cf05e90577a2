"""What one operation of a program costs at every position of a phase, as arrays over its steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from oasis_cli.formats.program import Opcode, Operation
from oasis_cli.hardware.target import FP16_BYTES, Target
from oasis_cli.simulator.gemm import Gemm, GemmTiming, OutlierSearch, spilled_bytes, time_gemm

Steps = NDArray[np.float64]
"""One number a step of a phase, or one number for all of them: shape [steps] or [1]. Whole numbers stay exact."""

MATRIX_OPCODES = frozenset({Opcode.EMBED, Opcode.LUT_GEMM, Opcode.DENSE_GEMM, Opcode.ATTENTION})
"""Operations that occupy the PE lines or the memory; all others are vector work."""


@dataclass(frozen=True)
class Phase:
    """Steps that run the same program: the one pass of a prompt, or the passes of a decode.

    Attributes:
        name: "prefill" or "decode".
        batch: sequences.
        queries: new tokens of a sequence in one step.
        contexts: tokens that the last query sees, itself included; one number a step.
    """

    name: str
    batch: int
    queries: int
    contexts: Steps

    @property
    def tokens(self) -> int:
        """M of the linear layers."""
        return self.batch * self.queries

    @property
    def steps(self) -> int:
        """How often the program runs."""
        return len(self.contexts)

    @property
    def pairs(self) -> Steps:
        """Query-key pairs of one sequence and head: each query sees all tokens up to its own."""
        return self.queries * self.contexts - self.queries * (self.queries - 1) / 2


@dataclass(frozen=True)
class Cost:
    """Cycles, bytes and busy units of an operation, one execution at each step.

    Attributes:
        matrix: cycles of the PE lines and the memory, stalls included.
        vector: cycles of the Functional and Clustering Units.
        work: the productive part of `matrix`: "main_branch" or "dense".
        stalls: the rest of `matrix` by cause.
        bytes: bytes read from each on-chip buffer, and moved by the HBM.
        hbm_bytes: the HBM's share by content.
        busy: cycles in which each unit works.
    """

    matrix: Steps
    vector: Steps
    work: Mapping[str, Steps] = field(default_factory=dict)
    stalls: Mapping[str, Steps] = field(default_factory=dict)
    bytes: Mapping[str, Steps] = field(default_factory=dict)
    hbm_bytes: Mapping[str, Steps] = field(default_factory=dict)
    busy: Mapping[str, Steps] = field(default_factory=dict)


def cost_operation(op: Operation, phase: Phase, target: Target) -> Cost:
    """What `op` costs in `phase` on `target`.

    Raises:
        InputError: the target cannot hold the operation.
    """
    match op.opcode:
        case Opcode.LUT_GEMM:
            return _from_gemm(gemm_of(op, phase, target))
        case Opcode.DENSE_GEMM:
            return _dense_gemm(op, phase, target)
        case Opcode.ATTENTION:
            return _attention(op, phase, target)
        case Opcode.EMBED:
            return _memory_bound("weights", phase.tokens * op.N * FP16_BYTES, target)
        case Opcode.QUANTIZE:
            return add_costs(token_scale(op, phase, target), clustering(op, phase, target))
        case _:
            return _elementwise(op, phase, target)


def add_costs(*costs: Cost) -> Cost:
    """Several operations one after the other, as one."""
    return Cost(
        matrix=sum((cost.matrix for cost in costs), _steps(0)),
        vector=sum((cost.vector for cost in costs), _steps(0)),
        work=_add([cost.work for cost in costs]),
        stalls=_add([cost.stalls for cost in costs]),
        bytes=_add([cost.bytes for cost in costs]),
        hbm_bytes=_add([cost.hbm_bytes for cost in costs]),
        busy=_add([cost.busy for cost in costs]),
    )


def gemm_of(op: Operation, phase: Phase, target: Target) -> GemmTiming:
    """The GEMM of a LUT_GEMM operation.

    Raises:
        InputError: the target cannot hold its indices.
    """
    return time_gemm(
        Gemm(phase.tokens, op.K, op.N),
        target,
        weight_bits=op.weight_bits,
        act_bits=op.act_bits,
        outliers=op.outliers,
        bias=op.bias,
    )


def token_scale(op: Operation, phase: Phase, target: Target) -> Cost:
    """The token scales of a QUANTIZE; `inlier_absmax` first waits for the whole outlier search."""
    M, passes = phase.tokens, target.rates.scale_passes
    search = OutlierSearch.of(op.K, op.outliers, target).cycles if op.variant == "inlier_absmax" else 0
    cycles = M * passes * _ceil(op.K / target.functional_elements)
    spilled = spilled_bytes(0, M * op.K, target)
    transfer = spilled / target.hbm_bytes_per_cycle
    return Cost(
        matrix=_steps(0),
        vector=_steps(max(cycles + M * search, _ceil(transfer))),
        bytes={"output_buffer": _steps(M * passes * op.K * FP16_BYTES), "hbm": _steps(spilled)},
        hbm_bytes={"activations": _steps(spilled)},
        busy={
            "functional_unit": _steps(cycles),
            "output_buffer": _steps(cycles),
            "orizuru": _steps(M * search),
            "memory_controller": _steps(transfer),
        },
    )


def clustering(op: Operation, phase: Phase, target: Target) -> Cost:
    """Clustering the activations of a QUANTIZE: n_A comparisons each, against boundaries in the LUT (§IV-C)."""
    M = phase.tokens
    cycles = _steps(M * _ceil(op.K / target.clustering_values))
    return Cost(
        matrix=_steps(0),
        vector=cycles,
        bytes={
            "output_buffer": _steps(M * op.K * FP16_BYTES),
            "lut": _steps(M * op.K * op.act_bits * FP16_BYTES),
        },
        busy={"clustering_unit": cycles, "output_buffer": cycles, "lut": cycles},
    )


def _steps(value: float) -> Steps:
    return np.array([value], dtype=np.float64)


def _ceil(value: float) -> int:
    return int(np.ceil(value))


def _add(tables: list[Mapping[str, Steps]]) -> dict[str, Steps]:
    total: dict[str, Steps] = {}
    for table in tables:
        for key, value in table.items():
            total[key] = total[key] + value if key in total else value
    return total


def _from_gemm(timing: GemmTiming) -> Cost:
    return Cost(
        matrix=_steps(timing.cycles),
        vector=_steps(0),
        work={"main_branch": _steps(timing.main_cycles)},
        stalls={cause: _steps(cycles) for cause, cycles in timing.stalls.items()},
        bytes={buffer: _steps(n) for buffer, n in timing.bytes.items()},
        hbm_bytes={content: _steps(n) for content, n in timing.hbm_bytes.items()},
        busy={unit: _steps(cycles) for unit, cycles in timing.busy.items()},
    )


def _dense(products: Steps, contents: dict[str, Steps], target: Target) -> Cost:
    """FP16 products on the units that the target names, fed by the HBM."""
    moved = sum(contents.values(), _steps(0))
    compute = np.ceil(products / target.dense_macs)
    transfer = moved / target.hbm_bytes_per_cycle
    cycles = np.ceil(np.maximum(compute, transfer))
    return Cost(
        matrix=cycles,
        vector=_steps(0),
        work={"dense": compute},
        stalls={"hbm": cycles - compute},
        bytes={"hbm": moved},
        hbm_bytes=contents,
        busy={
            "mac_tree": compute * target.dense.mac_trees,
            "mac": compute * target.dense.macs,
            "weight_index_buffer": compute,
            "output_buffer": compute,
            "memory_controller": transfer,
        },
    )


def _memory_bound(content: str, moved: int, target: Target) -> Cost:
    return _dense(_steps(0), {content: _steps(moved)}, target)


def _dense_gemm(op: Operation, phase: Phase, target: Target) -> Cost:
    """The output head: the last token of each sequence, its weights read once for as many as fit on chip."""
    M = phase.batch
    tile = max(1, target.chip.output_buffer_bytes // (FP16_BYTES * op.K))
    weights = _ceil(M / tile) * op.N * (_ceil(op.K * target.dense.weight_bits / 8) + FP16_BYTES * op.bias)
    contents = {"weights": _steps(weights), "activations": _steps(spilled_bytes(M * op.K, M * op.N, target))}
    return _dense(_steps(M * op.K * op.N), contents, target)


def _attention(op: Operation, phase: Phase, target: Target) -> Cost:
    """QK^T, softmax and PV of every head, and the KV cache: the new tokens written, all of them read."""
    channel_bytes = target.dense.kv_cache_bits / 8
    row_bytes = 2 * op.kv_heads * op.head_dim * channel_bytes
    contents = {
        "kv_cache": phase.batch * row_bytes * (_kv_rows(op, phase, target) + phase.queries),
        "activations": _steps(spilled_bytes(0, 2 * phase.tokens * op.N, target)),
    }
    products = 2.0 * op.head_dim * op.heads * phase.batch * phase.pairs
    dense = _dense(products, contents, target)
    scores = op.heads * phase.batch * phase.pairs
    softmax = target.rates.softmax_passes * np.ceil(scores / target.functional_elements)
    vector = Cost(
        matrix=_steps(0),
        vector=softmax,
        bytes={"output_buffer": target.rates.softmax_passes * scores * FP16_BYTES},
        busy={"functional_unit": softmax, "output_buffer": softmax},
    )
    return add_costs(dense, vector)


def _kv_rows(op: Operation, phase: Phase, target: Target) -> Steps:
    """Cached tokens read a sequence: half of the Output Buffer holds queries and sums of one key/value head's group."""
    if phase.queries == 1:
        return phase.contexts
    group_bytes = 2 * FP16_BYTES * op.head_dim * (op.heads // op.kv_heads)
    tile = max(1, target.chip.output_buffer_bytes // 2 // group_bytes)
    first = phase.contexts - phase.queries
    ends = np.minimum(np.arange(tile, phase.queries + tile, tile, dtype=np.float64), phase.queries)
    return first * len(ends) + float(ends.sum())


def _elementwise(op: Operation, phase: Phase, target: Target) -> Cost:
    """Norms, rotary embeddings, activations and additions on the Functional Unit."""
    rates = target.rates
    passes, operands = {
        Opcode.NORM: (rates.norm_passes, 1),
        Opcode.ROPE: (rates.rope_passes, 1),
        Opcode.GLU: (rates.activation_passes + len(op.sources) - 1, len(op.sources)),
        Opcode.ADD: (rates.add_passes, 2),
    }[op.opcode]
    M = phase.tokens
    parameters = FP16_BYTES * op.N * (1 + op.bias) if op.opcode is Opcode.NORM else 0
    spilled = spilled_bytes(0, (operands + 1) * M * op.N, target)
    transfer = (parameters + spilled) / target.hbm_bytes_per_cycle
    cycles = M * passes * _ceil(op.N / target.functional_elements)
    return Cost(
        matrix=_steps(0),
        vector=_steps(max(cycles, _ceil(transfer))),
        bytes={
            "output_buffer": _steps(FP16_BYTES * M * op.N * max(passes, operands)),
            "hbm": _steps(parameters + spilled),
        },
        hbm_bytes={"weights": _steps(parameters), "activations": _steps(spilled)},
        busy={
            "functional_unit": _steps(cycles),
            "output_buffer": _steps(cycles),
            "memory_controller": _steps(transfer),
        },
    )
