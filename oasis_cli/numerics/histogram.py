"""A fine weighted histogram of signed values: all the data of a site or matrix in a few thousand bins.

Bins follow the bits of float32, 256 to an octave, so they are as fine near zero as far out. Each bin keeps the
sum of its weights and of weight times value: means, and so centroids, come out exact. Histograms add up over
shards, samples and machines.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MANTISSA_BITS = 8
_SHIFT = 23 - _MANTISSA_BITS
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -24, 17
_BASE = ((127 + _LOWEST_EXPONENT) << 23) >> _SHIFT
_SIDE = (_HIGHEST_EXPONENT - _LOWEST_EXPONENT) << _MANTISSA_BITS
BINS = 2 * _SIDE + 1


def _bin_of(values: Tensor) -> Tensor:
    """Bin of every float32 value, int32: magnitudes below 2**-24 share the middle one, beyond 2**17 the end ones."""
    bins = values.abs().view(torch.int32).bitwise_right_shift_(_SHIFT).sub_(_BASE - 1).clamp_(0, _SIDE)
    # the sign bit as 0 or -1 negates: (b ^ -1) - -1 = -b
    sign = values.contiguous().view(torch.int32) >> 31
    return bins.bitwise_xor_(sign).sub_(sign).add_(_SIDE)


@dataclass
class Histogram:
    """Weighted histogram.

    Attributes:
        count: values in each bin, int64 [BINS].
        weight: sum of weights, float64 [BINS].
        moment: sum of weight * value, float64 [BINS].
    """

    count: Tensor
    weight: Tensor
    moment: Tensor

    @classmethod
    def empty(cls) -> "Histogram":
        """A histogram of nothing."""
        zeros = torch.zeros(BINS, dtype=torch.float64)
        return cls(torch.zeros(BINS, dtype=torch.int64), zeros, zeros.clone())

    def add(self, values: Tensor, weights: Tensor, leave_out: Tensor | None = None) -> None:
        """Count values with their weights.

        Args:
            values: finite, float32 of any shape.
            weights: finite and not negative, float32 of the same shape.
            leave_out: bool of the same shape, values that do not count; None counts all.
        """
        bins = _bin_of(values)
        if leave_out is not None:
            bins.masked_fill_(leave_out, BINS)  # one bin more than there are, cut off below
        flat = bins.flatten().cpu().numpy()
        moments = (weights * values).flatten().cpu().numpy()
        # numpy adds in float64 whatever the weights come in, several times faster than torch
        self.count += torch.from_numpy(np.bincount(flat, minlength=BINS)[:BINS])
        self.weight += torch.from_numpy(np.bincount(flat, weights.flatten().cpu().numpy(), minlength=BINS)[:BINS])
        self.moment += torch.from_numpy(np.bincount(flat, moments, minlength=BINS)[:BINS])

    def points(self) -> "Points":
        """The occupied bins as weighted points; unweighted where every weight is zero (a site without gradient)."""
        if float(self.weight.sum()) > 0:
            used = self.weight > 0
            mean = self.moment[used] / self.weight[used]
            return Points(mean.numpy(), self.weight[used].numpy())
        used = self.count > 0
        centre = _bin_centres()[used]
        return Points(centre.numpy(), self.count[used].double().numpy())


def _bin_centres() -> Tensor:
    """Middle of every bin, float64 [BINS]."""
    key = torch.arange(_SIDE + 1, dtype=torch.int32) + (_BASE - 1)
    edges = (torch.cat([key, key[-1:] + 1]) << _SHIFT).view(torch.float32).double()
    positive = (edges[1:-1] + edges[2:]) / 2
    return torch.cat([-positive.flip(0), torch.zeros(1, dtype=torch.float64), positive])


@dataclass(frozen=True)
class Points:
    """Weighted points on a line, ascending.

    Attributes:
        values: float64 [n], ascending.
        weights: float64 [n], positive.
    """

    values: NDArray[np.float64]
    weights: NDArray[np.float64]
