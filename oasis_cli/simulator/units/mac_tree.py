"""The MAC Tree (§III-B): the sum of the LUT's entries, weighted by how often each index occurs."""

import torch
from torch import Tensor


def weighted_sum(counts: Tensor, lut: Tensor) -> Tensor:
    """Σ count · entry over the 2^(n_A+n_W) entries, exact.

    Args:
        counts: integers, [M, N, 2**n_A, 2**n_W].
        lut: int16 or float16 [2**n_A, 2**n_W].

    Returns:
        float64 [M, N]. A count has at most 24 bits and an entry 16 (or 11, somewhere in float16's range of 41), so
        float64 holds every product and, for the lengths that layers have, every sum.
    """
    total = torch.zeros(counts.shape[:2], dtype=torch.float64)
    for act_level in range(len(lut)):
        total += counts[:, :, act_level].double() @ lut[act_level].double()
    return total
