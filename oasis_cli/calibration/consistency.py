"""Offline against online: what calibration learnt of a site, and what another text shows there (Figs. 3 and 5, §II-C).

A static threshold is one number a side. A token's own threshold is its k-th largest or smallest value; how far tokens'
own ones lie from the static one, and from each other, says how many outliers a static threshold keeps too many or too
few. Centroids are compared as a whole: what the offline ones cost on the other text over the best for it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from oasis_cli.calibration.fisher import visit_sites
from oasis_cli.calibration.statistics import SiteStatistics
from oasis_cli.data.windows import Windows
from oasis_cli.errors import InputError
from oasis_cli.formats.calibration import Calibration
from oasis_cli.models.checkpoint import Checkpoint
from oasis_cli.models.sites import find_sites
from oasis_cli.numerics.kmeans import Line, cluster
from oasis_cli.numerics.outlier_count import outlier_count
from oasis_cli.numerics.outliers import beyond_thresholds, search_outliers
from oasis_cli.progress import SILENT, Progress

_QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


@dataclass(frozen=True)
class Consistency:
    """One site, offline and online.

    Attributes:
        site: its name.
        offline: static thresholds, lower and upper, in the units of x.
        online_lower: every token's k-th smallest value, float32 [tokens].
        online_upper: every token's k-th largest value, float32 [tokens].
        nominal_share: outliers of a token that the fraction stands for, both sides.
        static_shares: of every token, the share of its values beyond the static thresholds, float32 [tokens].
        offline_centroids: of x / s_t, float64 [2**bits].
        online_centroids: K-Means of the other text, with the weights that calibration took, float64 [2**bits].
        extra_error: weighted squared error of the offline centroids on the other text over that of its own, less 1.
    """

    site: str
    offline: tuple[float, float]
    online_lower: Tensor
    online_upper: Tensor
    nominal_share: float
    static_shares: Tensor
    offline_centroids: Tensor
    online_centroids: Tensor
    extra_error: float

    @property
    def centroid_shift(self) -> float:
        """Largest distance of an offline centroid from the online one of its rank, over the online ones' span."""
        span = float(self.online_centroids[-1] - self.online_centroids[0])
        largest = float((self.offline_centroids - self.online_centroids).abs().max())
        return largest / span if span else 0.0

    @property
    def threshold_spread(self) -> float:
        """Mean of |own - static| / |static| over tokens, upper side: how far a token's threshold is from the static."""
        static = abs(self.offline[1])
        return float((self.online_upper - self.offline[1]).abs().mean()) / static if static else 0.0

    def to_json(self) -> dict[str, Any]:
        """Figures by name; tokens' own as quantiles 0, 5, 50, 95 and 100 %."""
        return {
            "threshold": {
                "offline": {"lower": self.offline[0], "upper": self.offline[1]},
                "online": {"lower": _quantiles(self.online_lower), "upper": _quantiles(self.online_upper)},
                "spread": self.threshold_spread,
            },
            "outlier_share": {
                "nominal": self.nominal_share,
                "static_mean": float(self.static_shares.mean()),
                "static": _quantiles(self.static_shares),
            },
            "centroids": {
                "offline": self.offline_centroids.tolist(),
                "online": self.online_centroids.tolist(),
                "largest_shift": self.centroid_shift,
                "extra_error": self.extra_error,
            },
        }


def _quantiles(values: Tensor) -> list[float]:
    found: list[float] = values.double().quantile(torch.tensor(_QUANTILES, dtype=torch.float64)).tolist()
    return found


@dataclass
class _Seen:
    """What one site has shown so far."""

    statistics: SiteStatistics
    lower: list[Tensor] = field(default_factory=list)
    upper: list[Tensor] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)


def measure_consistency(
    checkpoint: Checkpoint,
    calibration: Calibration,
    windows: Windows,
    bits: Literal[1, 2, 3, 4] = 4,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> list[Consistency]:
    """Pass another text through the model and compare every site with its calibration.

    Args:
        checkpoint: the model that was calibrated.
        calibration: of it.
        windows: of the other text.
        bits: of the codebook.
        device: where the model runs.
        progress: who is told.

    Returns:
        The sites in the order in which the model computes them.

    Raises:
        InputError: the calibration is of another model, or was made without outliers.
    """
    if calibration.model_digest != checkpoint.digest:
        raise InputError(
            f"{checkpoint.path}: not the model that was calibrated ({calibration.manifest['model']}); name that one"
        )
    recipe = calibration.recipe
    fraction, kind = float(recipe["outlier_fraction"]), recipe["scale_kind"]
    if not fraction:
        raise InputError("the calibration was made without outliers, so that it has no thresholds; calibrate with some")
    model = checkpoint.load_model(device=device)
    sites = find_sites(model)
    seen = {site.name: _Seen(SiteStatistics.empty(site.K)) for site in sites}

    def visit(site: Any, x: Tensor, gradient: Tensor | None) -> None:
        own = seen[site.name]
        own.statistics.add(site.name, x, gradient, fraction, kind)
        found = search_outliers(x, outlier_count(site.K, fraction))
        own.lower.append(found.lower.cpu())
        own.upper.append(found.upper.cpu())
        static = beyond_thresholds(x, calibration.sites[site.name].thresholds.to(x.device))
        own.shares.append(static.float().mean(dim=1).cpu())

    with progress.task("passing the text", len(windows.tokens), "sequences") as task:
        for tokens in windows.tokens:
            gradients = recipe.get("importance", "fisher") == "fisher"
            visit_sites(model, sites, tokens[None].to(device), visit, gradients)
            task.advance()
    with progress.task("clustering", len(sites), "sites") as task:
        compared = []
        for site in sites:
            compared.append(_compare(site.name, site.K, seen.pop(site.name), calibration, fraction, bits))
            task.advance()
    return compared


def _compare(name: str, K: int, seen: _Seen, calibration: Calibration, fraction: float, bits: int) -> Consistency:
    offline = calibration.sites[name]
    points = seen.statistics.histogram.points()
    theirs = offline.centroids[bits].double()
    ours, extra = theirs, 0.0
    if len(points.values):
        line = Line(points)
        best = cluster(points, (2**bits,), int(calibration.recipe["seed"]))[2**bits].centroids
        ours, error = torch.from_numpy(best), line.error(best)
        extra = line.error(theirs.numpy()) / error - 1 if error > 0 else 0.0
    lower, upper = offline.thresholds.tolist()
    return Consistency(
        site=name,
        offline=(lower, upper),
        online_lower=torch.cat(seen.lower),
        online_upper=torch.cat(seen.upper),
        nominal_share=2 * outlier_count(K, fraction) / K,
        static_shares=torch.cat(seen.shares),
        offline_centroids=theirs,
        online_centroids=ours,
        extra_error=extra,
    )
