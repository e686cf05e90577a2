"""What quantizes the layers of a decoder block: each matrix by itself, or with an eye on what the layer gives out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from oasis_cli.formats.calibration import Calibration
from oasis_cli.formats.quantized import QuantizationSpec
from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.gemm import ActivationFormat, QuantizedWeight
from oasis_cli.numerics.grid import to_grid
from oasis_cli.numerics.histogram import Histogram
from oasis_cli.numerics.kmeans import Floats, Line, cluster
from oasis_cli.numerics.outliers import find_outliers
from oasis_cli.numerics.scale import token_scale
from oasis_cli.quantization.kmeans_weights import WeightReport, no_centroids, quantize_weight
from oasis_cli.quantization.output_aware import SiteSolver, quantize_for_output
from oasis_cli.quantization.sequential import BlockStream
from oasis_cli.quantization.settings import QuantizationSettings


@dataclass(frozen=True)
class Job:
    """What a method is given.

    Attributes:
        model: the original, to be left as it is.
        spec: of the folder.
        calibration: of the model.
        options: the stage's settings.
    """

    model: PreTrainedModel
    spec: QuantizationSpec
    calibration: Calibration
    options: QuantizationSettings

    def weight(self, layer: str) -> Tensor:
        """A layer's original weights, [N, K] in the model's dtype."""
        weight: Tensor = self.model.get_submodule(layer).weight.detach()
        return weight

    def plain(self, layer: str) -> tuple[QuantizedWeight, WeightReport]:
        """K-Means of one matrix alone (§III-A)."""
        options = self.options
        return quantize_weight(
            self.weight(layer),
            self.spec.layers[layer].weight_bits,
            options.codebook_grid,
            f"{layer}.weight",
            options.seed,
        )

    @cached_property
    def site_bits(self) -> dict[str, int]:
        """n_A of every site whose activations are quantized."""
        return {layer.site: layer.act_bits for layer in self.spec.layers.values() if layer.quantizes_activations}

    def ship_codebook(self, site: str, line: Line, centroids: Floats) -> "SiteCodebook":
        """A site's centroids put on their grid."""
        codebook = to_grid(line, centroids, self.options.codebook_grid, f"site {site}")
        best = line.error(centroids)
        cost = line.error(codebook.centroids.double().numpy()) / best - 1 if best > 0 else 0.0
        return SiteCodebook(codebook, cost)

    def activation_format(self, site: str, codebook: Codebook | None) -> ActivationFormat | None:
        """How the runtime will quantize a site's input; None where it leaves it as it is."""
        if codebook is None:
            return None
        spec, found = self.spec, self.calibration.sites[site]
        static = found.thresholds if spec.outlier_mode == "static" else None
        return ActivationFormat(codebook, spec.scale_kind, spec.outliers_a_side(found.K), static)


@dataclass(frozen=True)
class SiteCodebook:
    """A site's activation codebook, and its error on the grid over its error off it, less 1."""

    codebook: Codebook
    grid_cost: float


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer as a method gives it."""

    weight: QuantizedWeight
    site: SiteCodebook | None
    report: WeightReport


@dataclass(frozen=True)
class StoredLayer:
    """One layer as it was read back from a finished file."""

    weight: QuantizedWeight
    act_codebook: Codebook | None


class BlockQuantizer(Protocol):
    """Quantizes blocks in their order; every block is either quantized or taken over."""

    def quantize(self, block: int, layers: tuple[str, ...]) -> Iterator[tuple[str, QuantizedLayer]]:
        """The quantized layers of a block, in the order of `layers`."""

    def take_over(self, block: int, read: Callable[[], Mapping[str, StoredLayer]]) -> None:
        """A block that an interrupted run finished; `read` gives its layers by name."""


class EachAlone:
    """The paper's way: every matrix by itself, sites as they were calibrated."""

    def __init__(self, job: Job) -> None:
        self._job, self._sites = job, calibrated_sites(job)

    def quantize(self, block: int, layers: tuple[str, ...]) -> Iterator[tuple[str, QuantizedLayer]]:
        """As `BlockQuantizer` says."""
        for name in layers:
            weight, report = self._job.plain(name)
            yield name, QuantizedLayer(weight, self._sites.get(self._job.spec.layers[name].site), report)

    def take_over(self, block: int, read: Callable[[], Mapping[str, StoredLayer]]) -> None:
        """Nothing to do: no block looks at another."""


class OutputAware:
    """`oasis-plus`: block after block, for the error of each layer's output on quantized inputs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._site_of = {name: layer.site for name, layer in job.spec.layers.items()}
        self._sites = {} if job.options.refits else calibrated_sites(job)
        samples = max(job.options.refit_samples, job.options.feedback_samples)
        self._stream = BlockStream(job.model, job.calibration.tokens[:samples], self._site_of)
        self._behind: list[tuple[int, Callable[[], Mapping[str, StoredLayer]]]] = []

    def quantize(self, block: int, layers: tuple[str, ...]) -> Iterator[tuple[str, QuantizedLayer]]:
        """As `BlockQuantizer` says; the output head, in no block, goes alone."""
        job, options = self._job, self._job.options
        if block < 0:
            yield from EachAlone(job).quantize(block, layers)
            return
        self._catch_up()
        if not layers:
            self._stream.advance(block, {}, {})
            return
        if options.refits:
            inputs = self._stream.inputs(block, layers, options.refit_samples)
            self._sites |= {site: self._refit(site, inputs.pop(site)) for site in list(inputs) if site in job.site_bits}
        formats = {site: self._format(site) for site in {self._site_of[name] for name in layers}}
        moments = {}
        if options.feeds_back:
            moments = self._stream.moments(block, layers, formats, options.feedback_samples)
        weights, solver = {}, None
        for name in layers:
            site = self._site_of[name]
            if site in moments:  # one solver at a time: at K = 11008 it holds 3 GB
                solver = SiteSolver(moments.pop(site), options.damping)
            weight, report = self._solve(name, solver) if solver is not None else job.plain(name)
            weights[name] = weight.dequantize()
            yield name, QuantizedLayer(weight, self._sites.get(site), report)
        self._stream.advance(block, weights, formats)

    def take_over(self, block: int, read: Callable[[], Mapping[str, StoredLayer]]) -> None:
        """Remembered until a later block needs what this one gives."""
        if block >= 0:
            self._behind.append((block, read))

    def _format(self, site: str) -> ActivationFormat | None:
        found = self._sites.get(site)
        return self._job.activation_format(site, None if found is None else found.codebook)

    def _catch_up(self) -> None:
        for block, read in self._behind:
            layers = read()
            formats = {
                self._site_of[name]: self._job.activation_format(self._site_of[name], layer.act_codebook)
                for name, layer in layers.items()
            }
            self._stream.advance(block, {name: layer.weight.dequantize() for name, layer in layers.items()}, formats)
        self._behind.clear()

    def _solve(self, name: str, solver: SiteSolver) -> tuple[QuantizedWeight, WeightReport]:
        options, bits = self._job.options, self._job.spec.layers[name].weight_bits
        return quantize_for_output(
            self._job.weight(name), solver, bits, options.codebook_grid, f"{name}.weight", options.seed
        )

    def _refit(self, site: str, inputs: list[Tensor]) -> SiteCodebook:
        """K-Means of x / s_t over inliers, each weighing s_t², which is the squared error of x."""
        spec, options = self._job.spec, self._job.options
        size = 2 ** self._job.site_bits[site]
        histogram = Histogram.empty()
        for x in inputs:
            count = spec.outliers_a_side(x.shape[1])
            scale = token_scale(x, spec.scale_kind, count)[:, None]
            alive = scale.flatten() > 0
            weights = scale.square().expand_as(x)
            histogram.add((x / scale)[alive], weights[alive], leave_out=find_outliers(x, count)[alive])
        points = histogram.points()
        if not len(points.values):
            return SiteCodebook(no_centroids(size, options.codebook_grid), 0.0)
        return self._job.ship_codebook(site, Line(points), cluster(points, (size,), options.seed)[size].centroids)


def calibrated_sites(job: Job) -> dict[str, SiteCodebook]:
    """The codebook of every site whose activations are quantized, from the calibration, on its grid."""
    return {
        name: job.ship_codebook(name, Line(site.points), site.centroids[job.site_bits[name]].double().numpy())
        for name, site in job.calibration.sites.items()
        if name in job.site_bits
    }


def quantizer_of(job: Job) -> BlockQuantizer:
    """What the settings ask for."""
    return OutputAware(job) if job.options.feeds_back or job.options.refits else EachAlone(job)
