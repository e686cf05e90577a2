"""Offline against online: what calibration learnt of a site, and what another text shows there (Figs. 3 and 5, §II-C).

A static threshold is one number a side. A token's own threshold is its k-th largest or smallest value; how far tokens'
own ones lie from the static one, and from each other, says how many outliers a static threshold keeps too many or too
few. Centroids are compared as a whole: what the offline ones cost on the other text over the best for it.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor

from oasis_cli.calibration.fisher import visit_sites
from oasis_cli.calibration.statistics import SiteStatistics
from oasis_cli.data.windows import Windows
from oasis_cli.errors import InputError
from oasis_cli.formats.calibration import Calibration
from oasis_cli.models.checkpoint import Checkpoint
from oasis_cli.models.sites import Site, find_sites
from oasis_cli.numerics.kmeans import Line, cluster
from oasis_cli.numerics.outlier_count import outlier_count
from oasis_cli.numerics.outliers import beyond_thresholds, search_outliers
from oasis_cli.progress import SILENT, Progress

_QUANTILES: Final = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True)
class OfflineOnline:
    """The same quantity offline and online, in the same units.

    Attributes:
        offline: float64 [n], or [1] where one value stands for all.
        online: float64 [n].
    """

    offline: Tensor
    online: Tensor

    def normalised(self) -> tuple[Tensor, Tensor]:
        """Both on the scale on which the least value of the two is 0 and the greatest 1, as Figs. 3 and 5 show them.

        Returns:
            offline and online, float64, shapes as they were; zeros where all values are equal.
        """
        both = torch.cat([self.offline, self.online])
        low, span = both.min(), both.max() - both.min()
        scale = span if span > 0 else torch.ones_like(span)
        return (self.offline - low) / scale, (self.online - low) / scale

    @property
    def differences(self) -> Tensor:
        """|online - offline| of the normalised values, float64 [n]."""
        offline, online = self.normalised()
        return (online - offline).abs()

    @property
    def rmse(self) -> float:
        """Root mean square of the normalised differences, as the paper gives it with Figs. 3 and 5."""
        return float(self.differences.square().mean().sqrt())


@dataclass(frozen=True)
class Consistency:
    """One site, offline and online.

    Attributes:
        site: its name.
        lower: static lower threshold [1] and every token's k-th smallest value [tokens], in the units of x.
        upper: static upper threshold [1] and every token's k-th largest value [tokens], in the units of x.
        nominal_share: outliers of a token that the fraction stands for, both sides.
        static_shares: of every token, the share of its values beyond the static thresholds, float64 [tokens].
        centroids: of x / s_t, [2**bits]; online by K-Means of the other text, with the weights that calibration took.
        extra_error: weighted squared error of the offline centroids on the other text over that of its own, less 1.
    """

    site: str
    lower: OfflineOnline
    upper: OfflineOnline
    nominal_share: float
    static_shares: Tensor
    centroids: OfflineOnline
    extra_error: float

    @property
    def tokens(self) -> int:
        """Tokens of the other text."""
        return len(self.static_shares)

    @property
    def centroid_shift(self) -> float:
        """Largest distance of an offline centroid from the online one of its rank, over the span of all of them."""
        return float(self.centroids.differences.max())

    def to_json(self) -> dict[str, Any]:
        """Figures by name; `outlier_share.static` is over tokens."""
        return {
            "threshold": {"lower": _threshold(self.lower), "upper": _threshold(self.upper)},
            "outlier_share": {"nominal": self.nominal_share, "static": spread(self.static_shares)},
            "centroids": {
                "offline": self.centroids.offline.tolist(),
                "online": self.centroids.online.tolist(),
                "largest_shift": self.centroid_shift,
                "rmse": self.centroids.rmse,
                "extra_error": self.extra_error,
            },
        }


def _threshold(pair: OfflineOnline) -> dict[str, Any]:
    """One side's thresholds; `mean_difference` is the mean over tokens of |own - static|, over |static|."""
    static = float(pair.offline)
    distance = float((pair.online - pair.offline).abs().mean())
    return {
        "offline": static,
        "online": spread(pair.online),
        "mean_difference": distance / abs(static) if static else None,
        "rmse": pair.rmse,
    }


def spread(values: Tensor) -> dict[str, float]:
    """How values, float64 [n], lie: mean, extremes, median, and the quantiles of 5 and 95 %."""
    quantiles = values.quantile(torch.tensor(list(_QUANTILES.values()), dtype=torch.float64)).tolist()
    return {"mean": float(values.mean())} | dict(zip(_QUANTILES, quantiles, strict=True))


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
    model = checkpoint.load_model(device=device, progress=progress)
    sites = find_sites(model)
    seen = {site.name: _Seen(SiteStatistics.empty(site.K)) for site in sites}

    def visit(site: Site, x: Tensor, gradient: Tensor | None) -> None:
        own = seen[site.name]
        own.statistics.add(site.name, x, gradient, fraction, kind)
        found = search_outliers(x, outlier_count(site.K, fraction))
        own.lower.append(found.lower.cpu())
        own.upper.append(found.upper.cpu())
        static = beyond_thresholds(x, calibration.sites[site.name].thresholds.to(x.device))
        own.shares.append(static.float().mean(dim=1).cpu())

    gradients = recipe.get("importance", "fisher") == "fisher"
    with progress.task("passing the text", len(windows.tokens), "sequences") as task:
        for tokens in windows.tokens:
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
    lower, upper = offline.thresholds.double().split(1)
    return Consistency(
        site=name,
        lower=OfflineOnline(lower, torch.cat(seen.lower).double()),
        upper=OfflineOnline(upper, torch.cat(seen.upper).double()),
        nominal_share=2 * outlier_count(K, fraction) / K,
        static_shares=torch.cat(seen.shares).double(),
        centroids=OfflineOnline(theirs, ours),
        extra_error=extra,
    )
