"""The Clustering Unit (§IV-C, Fig. 9b): a binary search tree of comparisons with the boundaries."""

import torch
from torch import Tensor


def cluster(x: Tensor, token_scale: Tensor, boundaries: Tensor) -> Tensor:
    """Map every activation to its nearest centroid, by n_A comparisons each.

    Args:
        x: activations, float32 [M, K].
        token_scale: s_t, float32 [M].
        boundaries: ascending midpoints of the codebook, float32 [2**n_A - 1].

    Returns:
        Indices, uint8 [M, K]. A value on a boundary goes up. A token that is not finite gets some index.

    Raises:
        ValueError: if there are not 2**n_A - 1 boundaries.
    """
    centroids = len(boundaries) + 1
    if centroids < 2 or centroids & (centroids - 1):
        raise ValueError(f"a search tree takes 2**n - 1 boundaries, got {len(boundaries)}")
    token_boundaries = token_scale[:, None] * boundaries  # each product rounded once to float32
    index = torch.zeros(x.shape, dtype=torch.int64)
    step = centroids // 2
    while step:
        # every comparison halves what is left: is the middle boundary passed?
        passed = token_boundaries.gather(1, index + (step - 1)) <= x
        index += step * passed
        step //= 2
    return index.to(torch.uint8)
