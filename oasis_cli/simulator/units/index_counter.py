"""The Concat Units and Index Counters (§IV-B, Fig. 9a): how often each concatenated index occurs."""

import torch
from torch import Tensor

_EXACT = 1 << 24  # float32 counts exactly up to here


def count_indices(act_index: Tensor, weight_index: Tensor, act_levels: int, weight_levels: int) -> Tensor:
    """Histogram of the concatenated indices i·2^n_W + j over k, for every token and output channel.

    The concatenated index is decoded into a one-hot vector, and the rows of the decoded matrix are summed, as the
    counters do: the one-hot vector of a concatenation is the outer product of the two one-hot vectors, so the sums
    over k are one product of 0/1 matrices.

    Args:
        act_index: i, uint8 [M, K].
        weight_index: j, uint8 [N, K].
        act_levels: 2**n_A.
        weight_levels: 2**n_W.

    Returns:
        Counts, float32 holding integers, [M, N, 2**n_A, 2**n_W]: the last two dimensions are the concatenated index.
        They sum to K.

    Raises:
        ValueError: if K is too long to be counted in float32.
    """
    (M, K), N = act_index.shape, weight_index.shape[0]
    if K > _EXACT:
        raise ValueError(f"K = {K} is beyond {_EXACT}")
    decoded_act = _decode(act_index, act_levels).view(act_levels * M, K)
    decoded_weight = _decode(weight_index, weight_levels).transpose(0, 1).reshape(N * weight_levels, K)
    counts = (decoded_act @ decoded_weight.T).view(act_levels, M, N, weight_levels)
    return counts.permute(1, 2, 0, 3)


def _decode(index: Tensor, levels: int) -> Tensor:
    """One-hot vectors, float32 [levels, rows, K]."""
    return (index == torch.arange(levels, dtype=torch.uint8)[:, None, None]).float()
