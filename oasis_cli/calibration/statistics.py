"""What calibration keeps of a site while tokens pass: sums only, so memory does not grow with them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oasis_cli.errors import InputError
from oasis_cli.numerics.histogram import Histogram
from oasis_cli.numerics.outlier_count import outlier_count
from oasis_cli.numerics.outliers import search_outliers
from oasis_cli.numerics.scale import ScaleKind, token_scale


@dataclass
class SiteStatistics:
    """Running sums of one site.

    Attributes:
        histogram: inliers' x / s_t, each weighted by its importance.
        second_moments: sum of x**2, float64 [K].
        sums: float64 [6]: tokens, zero tokens, sum of s_t, sum of the token's k-th smallest value, of its k-th
            largest, and of tokens whose k-th largest or smallest value is tied with one left inside.
        extremes: float32 [4]: least and greatest s_t, least and greatest x.
    """

    histogram: Histogram
    second_moments: Tensor
    sums: Tensor
    extremes: Tensor

    @classmethod
    def empty(cls, K: int) -> "SiteStatistics":
        """Nothing seen yet."""
        return cls(
            Histogram.empty(),
            torch.zeros(K, dtype=torch.float64),
            torch.zeros(6, dtype=torch.float64),
            torch.tensor([torch.inf, -torch.inf, torch.inf, -torch.inf]),
        )

    def add(self, name: str, x: Tensor, gradient: Tensor | None, fraction: float, kind: ScaleKind) -> None:
        """Take in the activations of one sequence.

        Clustering happens on v = x / s_t, and the loss's gradient with respect to v is s_t times that with respect
        to x: the Fisher weight of v is (s_t * dL/dx)**2, which is also what an error of v costs.

        Args:
            name: the site's, for messages.
            x: activations, float [T, K].
            gradient: of the loss with respect to x, [T, K]; None takes 1 for all, so that v weighs s_t**2, the squared
                error of x.
            fraction: outliers a side.
            kind: token scale.

        Raises:
            InputError: a value is not finite.
        """
        x, gradient = x.float(), torch.ones(1, 1, device=x.device) if gradient is None else gradient.float()
        for what, tensor in (("an activation", x), ("a gradient", gradient)):
            if not bool(tensor.sum().isfinite()):  # a sum keeps the mark of any value that is not finite
                raise InputError(f"{name}: {what} is not finite; the model overflows in this dtype or is damaged")
        k = outlier_count(x.shape[1], fraction)
        scale = token_scale(x, kind, k)
        leave_out = (scale == 0)[:, None].expand_as(x)
        if k:
            found = search_outliers(x, k)
            leave_out = found.mask | leave_out
            self.sums[3:] += torch.stack([s.double().sum() for s in (found.lower, found.upper, found.tied)]).cpu()
        safe = torch.where(scale > 0, scale, 1.0)[:, None]
        self.histogram.add(x / safe, (gradient * safe).square_().expand_as(x), leave_out)
        self.second_moments += x.square().sum(dim=0, dtype=torch.float64).cpu()
        self.sums[:3] += torch.stack([torch.tensor(len(x)), (scale == 0).sum().cpu(), scale.double().sum().cpu()])
        seen = torch.stack([scale.min(), scale.max(), x.min(), x.max()]).cpu()
        self.extremes[0::2] = torch.minimum(self.extremes[0::2], seen[0::2])
        self.extremes[1::2] = torch.maximum(self.extremes[1::2], seen[1::2])

    @property
    def tokens(self) -> int:
        """Tokens seen."""
        return int(self.sums[0])

    def thresholds(self) -> Tensor:
        """Static thresholds of OASIS-S: the means of the tokens' own, lower and upper, float32 [2]."""
        return (self.sums[3:5] / self.sums[0]).float()

    def summary(self) -> dict[str, Any]:
        """Statistics for the manifest."""
        tokens, zero, scale, lower, upper, tied = self.sums.tolist()
        return {
            "tokens": int(tokens),
            "zero_tokens": int(zero),
            "inliers": int(self.histogram.count.sum()),
            "scale": {
                "mean": scale / tokens,
                "min": float(self.extremes[0]),
                "max": float(self.extremes[1]),
            },
            "x": {"min": float(self.extremes[2]), "max": float(self.extremes[3])},
            "threshold": {"lower": lower / tokens, "upper": upper / tokens},
            "tied_tokens": int(tied),
            "importance_total": float(self.histogram.weight.sum()),
        }

    def state(self) -> dict[str, Tensor]:
        """Everything, as tensors, for a run that is to be resumed."""
        h = self.histogram
        return {
            "count": h.count,
            "weight": h.weight,
            "moment": h.moment,
            "second_moments": self.second_moments,
            "sums": self.sums,
            "extremes": self.extremes,
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "SiteStatistics":
        """Inverse of `state`."""
        histogram = Histogram(state["count"], state["weight"], state["moment"])
        return cls(histogram, state["second_moments"], state["sums"], state["extremes"])
