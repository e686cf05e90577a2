"""The Cartesian-product LUT (§III-B, Table I): every product of an activation and a weight centroid, once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from oasis_cli.numerics.codebook import Codebook


@dataclass(frozen=True)
class Lut:
    """Products of centroids.

    Attributes:
        entries: [2**n_A * 2**n_W] at index a * 2**n_W + w; int16 and exact on the int8 grid, float16 otherwise.
        step: what one unit of an entry stands for; 1 on the fp16 grid.
    """

    entries: Tensor
    step: float

    def table(self, weight_levels: int) -> Tensor:
        """Entries as float64 [activation levels, weight levels]."""
        return self.entries.double().view(-1, weight_levels)


def build_lut(act_codebook: Codebook, weight_codebook: Codebook) -> Lut:
    """All products of the two codebooks, rounded as they are shipped.

    Raises:
        ValueError: one codebook is on the int8 grid and the other is not.
    """
    if bool(act_codebook.step) != bool(weight_codebook.step):
        raise ValueError("both codebooks must be on the same grid")
    if act_codebook.step:
        act, weight = act_codebook.integers.to(torch.int16), weight_codebook.integers.to(torch.int16)
        return Lut((act[:, None] * weight[None, :]).flatten(), act_codebook.step * weight_codebook.step)
    product = act_codebook.centroids.double()[:, None] * weight_codebook.centroids.double()[None, :]
    return Lut(product.flatten().half(), 1.0)
