"""The main branch of the PE lines (§III-B): the sum of LUT entries over k, in two engines with identical results."""

from collections.abc import Callable
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from oasis_cli.simulator.units.index_counter import count_indices
from oasis_cli.simulator.units.mac_tree import half_precision_sum, weighted_sum

Engine = Literal["counted", "gathered"]
ENGINES: Final[tuple[Engine, ...]] = get_args(Engine)
_COUNTS_AT_ONCE: Final = 1 << 24
_ENTRIES_AT_ONCE: Final = 1 << 26
_EXACT: Final = 1 << 24  # float32 adds integers exactly up to here


def counted_gemm(act_index: Tensor, weight_index: Tensor, lut: Tensor) -> Tensor:
    """As the hardware does it: count the concatenated indices, then weigh the LUT's entries with the counts.

    Args:
        act_index: i, uint8 [M, K].
        weight_index: j, uint8 [N, K].
        lut: int16 or float16 [2**n_A, 2**n_W].

    Returns:
        Σ_k LUT[i, j], exact, float64 [M, N].
    """
    return _count_and_sum(act_index, weight_index, lut, weighted_sum)


def half_precision_gemm(act_index: Tensor, weight_index: Tensor, entries: Tensor, tree_inputs: int) -> Tensor:
    """The counted sum through the paper's FP16 MAC tree, which rounds at every step.

    Args:
        act_index: i, uint8 [M, K].
        weight_index: j, uint8 [N, K].
        entries: products of centroids, float16 [2**n_A, 2**n_W].
        tree_inputs: inputs of a MAC tree.

    Returns:
        float64 [M, N], holding float16 values.
    """
    return _count_and_sum(
        act_index, weight_index, entries, lambda counts, lut: half_precision_sum(counts, lut, tree_inputs)
    ).double()


def _count_and_sum(
    act_index: Tensor, weight_index: Tensor, lut: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Count in blocks of tokens and output channels, small enough to be held, and reduce each block to its sums."""
    M, N = len(act_index), len(weight_index)
    rows = max(1, min(M, _COUNTS_AT_ONCE // (lut.numel() * min(N, 256))))
    columns = max(1, _COUNTS_AT_ONCE // (lut.numel() * rows))
    blocks = [
        [reduce(count_indices(tokens, channels, *lut.shape), lut) for channels in weight_index.split(columns)]
        for tokens in act_index.split(rows)
    ]
    return torch.cat([torch.cat(row, 1) for row in blocks])


def gathered_gemm(act_index: Tensor, weight_index: Tensor, lut: Tensor) -> Tensor:
    """The same sum without counting: look up LUT[i, j] for every k and add. Many times faster for whole windows.

    Arguments and result are those of `counted_gemm`.
    """
    act_levels, N, K = lut.shape[0], *weight_index.shape
    integer = not lut.dtype.is_floating_point
    table = lut.to(torch.float32 if integer else torch.float64)
    largest = max(1.0, float(table.abs().max()))
    limit = _ENTRIES_AT_ONCE // (act_levels * N)
    span = max(1, min(K, limit, int(_EXACT // largest) if integer else K))
    total = torch.zeros(len(act_index), N, dtype=torch.float64)
    for start in range(0, K, span):
        rows = _gather_sums(act_index[:, start : start + span], weight_index[:, start : start + span], table)
        total += rows
    return total


def _gather_sums(act_index: Tensor, weight_index: Tensor, table: Tensor) -> Tensor:
    """Σ_k table[i, j] over a span of channels short enough to be exact in the table's type, [M, N]."""
    act_levels, K = table.shape[0], act_index.shape[1]
    # row a·K + k holds LUT[a, j[:, k]] for all output channels
    entries = table[:, weight_index.T.contiguous().long()].reshape(act_levels * K, -1)
    chosen = act_index.long() * K + torch.arange(K)
    return torch.nn.functional.embedding_bag(chosen, entries, mode="sum")


GEMMS: Final[dict[Engine, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "counted": counted_gemm,
    "gathered": gathered_gemm,
}
