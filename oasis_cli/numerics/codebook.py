"""Codebooks: boundaries, nearest centroids, and the grids that their numbers may be put on."""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

CodebookGrid = Literal["int8", "fp16"]
GRID_LIMIT = 127
_CHUNK: Final = 1 << 18
"""Values compared at once on a CPU, so that they stay in its cache."""


def boundaries(codebook: Tensor) -> Tensor:
    """Midpoints between neighbouring centroids, each rounded once to float32 (§IV-C).

    Args:
        codebook: ascending centroids, float [C].

    Returns:
        float32 [C - 1].

    Raises:
        ValueError: the codebook descends somewhere.
    """
    if (codebook.diff() < 0).any():
        raise ValueError(f"codebook must ascend, got {codebook.tolist()}")
    wide = codebook.double()
    return ((wide[1:] + wide[:-1]) / 2).float()


def assign_indices(x: Tensor, token_scale: Tensor, codebook: Tensor) -> Tensor:
    """Nearest centroid of every activation, as the Clustering Unit finds it (§IV-C).

    The token's boundaries are the float32 products s_t * b_m and the comparison with x is exact: no division,
    so every implementation gets the same index.

    Args:
        x: activations, float [M, K].
        token_scale: one scale a token, float32 [M], not negative.
        codebook: ascending centroids, float [2**n_A].

    Returns:
        Indices, uint8 [M, K]. A value on a boundary goes up; beyond the ends it saturates.

    Raises:
        ValueError: the codebook descends somewhere.
    """
    x = x.float()
    limits = (token_scale[:, None] * boundaries(codebook)[None, :]).T.contiguous()
    index = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    rows = max(1, _CHUNK // max(1, x.shape[1])) if x.device.type == "cpu" else max(1, len(x))
    passes = torch.empty(min(rows, len(x)), x.shape[1], dtype=torch.bool, device=x.device)
    for start in range(0, len(x), rows):
        values, count = x[start : start + rows], index[start : start + rows]
        passed = passes[: len(values)]
        # one comparison a boundary, as the hardware's tree counts them: several times faster than a binary search.
        # A tie passes; a boundary that is NaN passes nothing, and the output of such a token is NaN all the same.
        for limit in limits[:, start : start + rows]:
            torch.ge(values, limit[:, None], out=passed)
            count += passed.view(torch.uint8)
    return index


@dataclass(frozen=True)
class Codebook:
    """Centroids as they are shipped.

    Attributes:
        centroids: float16 [C], ascending.
        step: on the int8 grid every centroid is exactly an integer in [-127, 127] times this; 0 on the fp16 grid.
    """

    centroids: Tensor
    step: float = 0.0

    @property
    def integers(self) -> Tensor:
        """The grid's integers, int8 [C].

        Raises:
            ValueError: the codebook is not on the int8 grid.
        """
        return grid_integers(self.centroids, self.step)


def grid_integers(centroids: Tensor, step: float) -> Tensor:
    """Integers of centroids on the int8 grid.

    Args:
        centroids: float16 [C].
        step: the grid's step, positive.

    Returns:
        int8 [C] with integer * step == centroid exactly.

    Raises:
        ValueError: some centroid is not an integer multiple of the step within int8.
    """
    if not step > 0:
        raise ValueError(f"an int8 grid needs a positive step, got {step}")
    exact = centroids.double() / step
    integers = exact.round()
    if bool((integers * step != centroids.double()).any()) or bool((integers.abs() > GRID_LIMIT).any()):
        raise ValueError("centroids do not lie on the int8 grid of their step")
    return integers.to(torch.int8)
