"""Codebooks: boundaries, nearest centroids, and the grids that their numbers may be put on."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CodebookGrid = Literal["int8", "fp16"]
GRID_LIMIT = 127


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
    token_boundaries = token_scale[:, None] * boundaries(codebook)[None, :]
    # right=True counts boundary <= value: the hardware's comparators take a tie as passed.
    # NaN boundaries sort last, so a token that is not finite gets some index; its output is NaN all the same.
    return torch.searchsorted(token_boundaries, x.float().contiguous(), right=True).to(torch.uint8)


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
