"""The outliers of a window as the outlier branch takes them: one channel after the other for every token."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OutlierSet:
    """Channels in the order in which they are compensated.

    Attributes:
        channels: int64 [M, P].
        valid: bool [M, P]; False where a token has fewer, or a channel came up already.
    """

    channels: Tensor
    valid: Tensor

    def mask(self, K: int) -> Tensor:
        """The same as a bool [M, K]."""
        marks = torch.zeros(len(self.channels), K, dtype=torch.uint8)
        marks.scatter_reduce_(1, self.channels, self.valid.to(torch.uint8), "amax")
        return marks.bool()


def from_mask(mask: Tensor) -> OutlierSet:
    """The marked channels of every token, ascending.

    Args:
        mask: bool [M, K].
    """
    most = int(mask.sum(1).max()) if len(mask) else 0
    # a stable sort of the marks puts the marked channels first, in their own order
    channels = mask.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :most]
    return OutlierSet(channels, mask.gather(1, channels))


def beyond_thresholds(x: Tensor, thresholds: Tensor) -> OutlierSet:
    """Static outliers (OASIS-S): the values outside of a site's thresholds.

    Args:
        x: activations, float32 [M, K].
        thresholds: lower and upper, float32 [2].
    """
    return from_mask((x < thresholds[0]) | (x > thresholds[1]))
