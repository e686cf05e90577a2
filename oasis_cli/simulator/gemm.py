"""How long one WAQ LUT-GEMM takes on the PE lines, what it moves and which units it keeps busy.

The dataflow and every formula are derived in docs/accelerator.md.
"""

import math
from dataclasses import dataclass

from oasis_cli.errors import InputError
from oasis_cli.hardware.target import FP16_BYTES, Target, lut_bytes


@dataclass(frozen=True)
class Gemm:
    """Sizes of a matrix product: M tokens, K input channels, N output channels.

    Raises:
        ValueError: if a size is below one.
    """

    M: int
    K: int
    N: int

    def __post_init__(self) -> None:
        if min(self.M, self.K, self.N) < 1:
            raise ValueError(f"sizes must be positive, got {self.M}-{self.K}-{self.N}")


@dataclass(frozen=True)
class GemmTiming:
    """One execution of a GEMM; `cycles` is `main_cycles` and all stalls together.

    Attributes:
        gemm: its sizes.
        main_cycles: counting and reducing alone, without filling the pipeline.
        outlier_cycles: searching and compensating the outliers of all tokens, one token after the other.
        merge_cycles: adding both branches on the MAC units.
        hbm_cycles: moving all its bytes at the memory's stream rate.
        cycles: from the first weight asked for to the last output written.
        stalls: cycles added to `main_cycles`, by cause: "hbm", "fill", "outlier_branch".
        bytes: bytes read from each on-chip buffer, and moved by the HBM.
        hbm_bytes: the HBM's share by content: "weights", "tables", "outlier_columns", "activations".
        busy: cycles in which each unit works; 1.0 is the whole chip's complement for one cycle.
    """

    gemm: Gemm
    main_cycles: int
    outlier_cycles: int
    merge_cycles: int
    hbm_cycles: int
    cycles: int
    stalls: dict[str, int]
    bytes: dict[str, int]
    hbm_bytes: dict[str, int]
    busy: dict[str, float]


def count_cycles(K: int, target: Target) -> int:
    """Cycles in which a line counts the K index pairs of one output channel.

    A channel longer than the Concat Units goes through them in passes, the counters keep adding (§IV-B).
    """
    line = target.pe_line
    passes, rest = divmod(K, line.concat_units)
    full_pass = math.ceil(line.concat_units / line.indices_per_cycle)
    return passes * full_pass + math.ceil(rest / line.indices_per_cycle)


def tree_cycles(weight_bits: int, act_bits: int, target: Target) -> int:
    """Cycles in which a MAC Tree takes the 2^(n_A+n_W) products of counts and LUT entries."""
    entries: int = 2 ** (weight_bits + act_bits)
    return math.ceil(entries / target.pe_line.mac_tree_inputs)


def index_row_bytes(channels: int, target: Target) -> int:
    """Bytes of a row of stored indices."""
    return math.ceil(channels * target.pe_line.index_bits / 8)


def spilled_bytes(held: int, moved: int, target: Target) -> int:
    """Of `moved` FP16 values, the bytes that find no room in the Output Buffer beside the `held` ones."""
    over = FP16_BYTES * (held + moved) - target.chip.output_buffer_bytes
    return min(FP16_BYTES * moved, max(0, over))


@dataclass(frozen=True)
class OutlierSearch:
    """Orizuru on one token of K values, k outliers a side (§IV-D).

    Beyond the tree's leaves, K is searched as one larger tree whose segments pass through the comparators, one a
    cycle behind the other; the bits of all its nodes are kept.

    Attributes:
        start_cycles: building both trees, until the first outlier can be popped.
        pop_cycles: popping an outlier and repairing its path, before the next can be popped.
        pops: outliers of both trees.
    """

    start_cycles: int
    pop_cycles: int
    pops: int

    @property
    def cycles(self) -> int:
        """The whole search, when nothing hides it."""
        return self.start_cycles + self.pops * self.pop_cycles

    @classmethod
    def of(cls, K: int, outliers: int, target: Target) -> "OutlierSearch":
        """The search over K values on `target`, `outliers` a side; without outliers it takes no time."""
        if not outliers:
            return cls(0, 0, 0)
        levels = (K - 1).bit_length() * target.rates.orizuru_level_cycles
        return cls(levels + math.ceil(K / target.orizuru.leaves) - 1, 1 + levels, 2 * outliers)


def search_comparisons(K: int, outliers: int) -> int:
    """Comparisons of the two trees over K values: 1.5 K - 2 to build them, log2 K a pop (§IV-D).

    The min tree takes the max tree's K/2 leaf comparisons over, reversed.
    """
    if not outliers:
        return 0
    return 2 * (K - 1) - K // 2 + 2 * outliers * (K - 1).bit_length()


@dataclass(frozen=True)
class _Plan:
    """The numbers that the formulas below share."""

    gemm: Gemm
    target: Target
    weight_bits: int
    act_bits: int
    outliers: int
    bias: bool

    @property
    def groups(self) -> int:
        """Rounds in which every line takes one output channel."""
        return math.ceil(self.gemm.N / self.target.pe_line.count)

    @property
    def count(self) -> int:
        return count_cycles(self.gemm.K, self.target)

    @property
    def tree(self) -> int:
        return tree_cycles(self.weight_bits, self.act_bits, self.target)

    @property
    def pace(self) -> int:
        return max(self.count, self.tree)

    @property
    def row(self) -> int:
        """Bytes of one output channel's weight indices, and of one token's activation indices."""
        return index_row_bytes(self.gemm.K, self.target)

    @property
    def column(self) -> int:
        return index_row_bytes(self.gemm.N, self.target)

    @property
    def tile(self) -> int:
        """Tokens that share one pass over the weights."""
        if self.row > self.target.pe_line.weight_index_buffer_bytes:
            return 1  # a channel does not stay on chip, so every token streams it anew
        return min(self.gemm.M, self.target.chip.activation_index_buffer_bytes // self.row)

    @property
    def passes(self) -> int:
        """Passes over the weights."""
        return math.ceil(self.gemm.M / self.tile)

    @property
    def pass_bytes(self) -> int:
        """HBM bytes of one pass: indices, scales, bias, LUT and codebooks."""
        return self.gemm.N * self.row + self.table_bytes

    @property
    def table_bytes(self) -> int:
        return FP16_BYTES * self.gemm.N * (1 + self.bias) + lut_bytes(self.weight_bits, self.act_bits)

    @property
    def column_bytes(self) -> int:
        """HBM bytes of one token's outlier columns."""
        return 2 * self.outliers * self.column if self.target.schedule.outlier_columns_from_hbm else 0

    @property
    def search(self) -> OutlierSearch:
        return OutlierSearch.of(self.gemm.K, self.outliers, self.target)

    @property
    def compensation(self) -> int:
        """Cycles of one outlier on the MAC units: one product for every output channel."""
        return math.ceil(self.gemm.N / self.target.compensation_macs)

    @property
    def merge(self) -> int:
        return math.ceil(self.gemm.N / self.target.compensation_macs)


def time_gemm(
    gemm: Gemm, target: Target, *, weight_bits: int = 4, act_bits: int = 4, outliers: int = 0, bias: bool = False
) -> GemmTiming:
    """Time one LUT-GEMM whose input is already clustered.

    Args:
        gemm: its sizes.
        target: the accelerator.
        weight_bits: n_W.
        act_bits: n_A.
        outliers: k, outliers a side of each token.
        bias: whether a bias is fetched and added.

    Raises:
        InputError: the target cannot hold such indices.
        ValueError: more outliers than values.
    """
    if not 0 <= 2 * outliers <= gemm.K:
        raise ValueError(f"{outliers} outliers a side do not fit K = {gemm.K}")
    plan = _Plan(gemm, target, weight_bits, act_bits, outliers, bias)
    _check_fit(plan)
    hbm_bytes = _hbm_bytes(plan)
    main = gemm.M * plan.groups * plan.pace
    stream, fill = _stream_cycles(plan, hbm_bytes["activations"])
    main_path = math.ceil(stream + fill)
    detection, branch = _outlier_path(plan)
    hbm_stall = int(stream - main)
    stalls = {
        "hbm": hbm_stall,
        "fill": main_path - main - hbm_stall,
        "outlier_branch": detection + max(0, branch - main_path),
    }
    hbm_cycles = sum(hbm_bytes.values()) / target.hbm_bytes_per_cycle
    merge = gemm.M * plan.merge
    return GemmTiming(
        gemm=gemm,
        main_cycles=main,
        outlier_cycles=detection + branch - merge if outliers else 0,
        merge_cycles=merge,
        hbm_cycles=math.ceil(hbm_cycles),
        cycles=main + sum(stalls.values()),
        stalls=stalls,
        bytes=_buffer_bytes(plan) | {"hbm": sum(hbm_bytes.values())},
        hbm_bytes=hbm_bytes,
        busy=_busy(plan) | {"memory_controller": hbm_cycles},
    )


def _check_fit(plan: _Plan) -> None:
    line, chip = plan.target.pe_line, plan.target.chip
    if max(plan.weight_bits, plan.act_bits) > line.index_bits:
        raise InputError(
            f"target {plan.target.name}: pe_line.index_bits is {line.index_bits}, the program has W{plan.weight_bits}"
            f"A{plan.act_bits}; quantize with fewer bits or widen it"
        )
    if plan.row > chip.activation_index_buffer_bytes:
        raise InputError(
            f"target {plan.target.name}: chip.activation_index_buffer_bytes is {chip.activation_index_buffer_bytes}, "
            f"one token of K = {plan.gemm.K} needs {plan.row}; raise it"
        )


def _hbm_bytes(plan: _Plan) -> dict[str, int]:
    M, K, N = plan.gemm.M, plan.gemm.K, plan.gemm.N
    return {
        "weights": plan.passes * N * plan.row,
        "tables": plan.passes * plan.table_bytes,
        "outlier_columns": M * plan.column_bytes,
        "activations": spilled_bytes(M * K, M * N, plan.target),
    }


def _stream_cycles(plan: _Plan, spilled: int) -> tuple[float, float]:
    """Cycles of the main branch fed by the HBM, and those before its first and after its last step."""
    rate, rates = plan.target.hbm_bytes_per_cycle, plan.target.rates
    token_bytes = plan.column_bytes + spilled / plan.gemm.M

    def tile_cycles(tokens: int) -> float:
        counted = tokens * plan.groups * plan.pace
        return max(float(counted), (plan.pass_bytes + tokens * token_bytes) / rate)

    full, rest = divmod(plan.gemm.M, plan.tile)
    stream = full * tile_cycles(plan.tile) + (tile_cycles(rest) if rest else 0.0)
    # a chain of stages takes one item through all of them, then the slowest stage's time for each further item
    first_load = plan.pass_bytes / plan.groups / rate
    latency = rates.concat_cycles + plan.target.mac_tree_latency + rates.merge_cycles
    fill = latency + min(plan.count, plan.tree) + min(first_load, plan.tile * plan.pace)
    return stream, fill


def _outlier_path(plan: _Plan) -> tuple[int, int]:
    """Cycles before the main branch may start, and of the branch that runs beside it, merge included."""
    M, search = plan.gemm.M, plan.search
    if not search.pops:
        return 0, 0
    if not plan.target.schedule.look_ahead:
        return M * search.cycles, M * (search.pops * plan.compensation + plan.merge)
    # the first pop shows one outlier; from then on a search step hides behind a compensation, or the other way round
    token = search.start_cycles + 1 + search.pops * max(plan.compensation, search.pop_cycles)
    return 0, M * (token + plan.merge)


def _buffer_bytes(plan: _Plan) -> dict[str, int]:
    """Bytes read on chip (Fig. 18a counts one direction); clustering the input is charged where it happens."""
    M, K, N = plan.gemm.M, plan.gemm.K, plan.gemm.N
    entries: int = 2 ** (plan.weight_bits + plan.act_bits)
    searched = K if plan.outliers else 0
    return {
        "weight_index_buffer": M * (N * plan.row + 2 * plan.outliers * plan.column),
        "lut": M * N * entries * FP16_BYTES,
        "activation_index_buffer": M * plan.groups * plan.row,
        "output_buffer": M * FP16_BYTES * (searched + N),
    }


def _busy(plan: _Plan) -> dict[str, float]:
    M, K, target = plan.gemm.M, plan.gemm.K, plan.target
    channels = M * plan.gemm.N / target.pe_line.count  # the last round may leave lines idle
    compensation = M * plan.search.pops * plan.compensation
    merge = M * plan.merge
    return {
        "concat_unit": channels * math.ceil(K / target.pe_line.concat_units),
        # rows for counting and columns for compensation leave it at the same time
        "weight_index_buffer": max(channels * plan.count, float(compensation)),
        "index_counter": channels * plan.count,
        "dequant_unit": float(compensation),
        "mac_tree": channels * plan.tree,
        "mac": float(compensation + merge),
        "output_buffer": float(M * math.ceil(K / target.orizuru.leaves) * bool(plan.outliers) + merge),
        "activation_index_buffer": float(M * plan.groups * plan.count),
        "lut": float(M * plan.groups * plan.tree),
        "orizuru": float(M * plan.search.cycles),
        "error_calculation_unit": float(M * plan.search.pops),
    }
