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


def half_precision_sum(counts: Tensor, entries: Tensor, inputs: int) -> Tensor:
    """The same sum as a tree of FP16 MACs makes it: every product and every addition is rounded to float16.

    Each cycle takes `inputs` entries, in the order of the concatenated index, through the tree's levels; the cycles'
    sums are added one after the other.

    Args:
        counts: integers, [M, N, 2**n_A, 2**n_W]; float16 holds them exactly up to 2048.
        entries: products of centroids, float16 [2**n_A, 2**n_W].
        inputs: products that enter the tree each cycle, a power of two.

    Returns:
        float16 [M, N].
    """
    products = (counts.half() * entries).flatten(2)
    missing = -products.shape[-1] % inputs
    partial = torch.nn.functional.pad(products, (0, missing)).unflatten(-1, (-1, inputs))
    while partial.shape[-1] > 1:
        partial = partial[..., 0::2] + partial[..., 1::2]
    total: Tensor = partial[..., 0, 0]
    for cycle in range(1, partial.shape[-2]):
        total = total + partial[..., cycle, 0]
    return total
