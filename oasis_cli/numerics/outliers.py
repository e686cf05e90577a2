"""Outliers of a token: its k largest and k smallest values (§III-C, §IV-D), or those beyond static thresholds."""

from typing import NamedTuple

import torch
from torch import Tensor


class OutlierSearch(NamedTuple):
    """What a search of every token found.

    Attributes:
        mask: the outliers, bool [M, K].
        lower: each token's k-th smallest value, float32 [M].
        upper: each token's k-th largest value, float32 [M].
        tied: bool [M], whether a value equal to one of these two was left inside.
    """

    mask: Tensor
    lower: Tensor
    upper: Tensor
    tied: Tensor


def find_outliers(x: Tensor, k: int) -> Tensor:
    """Mark the k largest and the k smallest values of every token, as Orizuru finds them (§IV-D).

    Ties go to the lower channel in both trees. The trees keep separate masks, so in a token with fewer than 2k
    distinct values one channel may be popped by both; it is marked, and compensated, once.

    Args:
        x: activations, float [M, K].
        k: outliers a side, at most K/2.

    Returns:
        bool [M, K]. A token that holds NaN has no outliers.

    Raises:
        ValueError: 2k > K, or k negative.
    """
    M, K = x.shape
    if k < 0 or 2 * k > K:
        raise ValueError(f"k = {k} outliers a side do not fit K = {K}")
    if k == 0 or M == 0:
        return torch.zeros(M, K, dtype=torch.bool, device=x.device)
    return search_outliers(x, k).mask


def search_outliers(x: Tensor, k: int) -> OutlierSearch:
    """`find_outliers` of x, float [M, K], with the values that it stopped at; k and M are at least 1."""
    x = x.float()
    above, upper, tied_above = _extreme(x, k, largest=True)
    below, lower, tied_below = _extreme(x, k, largest=False)
    return OutlierSearch(above | below, lower, upper, tied_above | tied_below)


def _extreme(x: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest or smallest of every row, ties to the lower column; the k-th value; whether it is tied."""
    threshold = x.topk(k, dim=1, largest=largest).values[:, -1:]
    found = x >= threshold if largest else x <= threshold
    tied = found.sum(dim=1) > k
    rows = tied.nonzero().squeeze(1)
    if len(rows):  # few: all beyond the k-th value, then the first of those equal to it
        equal = x[rows] == threshold[rows]
        beyond = found[rows] & ~equal
        room = k - beyond.sum(dim=1, keepdim=True)
        found[rows] = beyond | (equal & (equal.cumsum(dim=1) <= room))
    return found, threshold.squeeze(1), tied


def beyond_thresholds(x: Tensor, thresholds: Tensor) -> Tensor:
    """Static outliers (OASIS-S): values outside the thresholds that calibration learnt.

    Args:
        x: activations, float [M, K].
        thresholds: lower and upper, float32 [2], in the units of x.

    Returns:
        bool [M, K].
    """
    x = x.float()
    return (x < thresholds[0]) | (x > thresholds[1])
