"""The paper's weights (§III-A): one K-Means codebook a matrix, one scale an output channel."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oasis_cli.errors import InputError
from oasis_cli.numerics.codebook import Codebook, CodebookGrid, assign_indices
from oasis_cli.numerics.gemm import QuantizedWeight
from oasis_cli.numerics.grid import to_grid
from oasis_cli.numerics.histogram import Histogram
from oasis_cli.numerics.kmeans import Line, cluster

_LARGEST_HALF = 65504.0


def to_decibels(relative_error: float) -> float | None:
    """The signal-to-noise ratio of a relative squared error, in dB; None without noise."""
    return -10 * math.log10(relative_error) if relative_error else None


@dataclass(frozen=True)
class WeightReport:
    """How well a matrix was kept.

    Attributes:
        relative_error: sum of squared errors over sum of squares of the weights.
        kmeans_error: weighted squared error of W / s_n before the codebook went on its grid, per unit of weight.
        faiss_error: the same of faiss's result.
        optimum_won: whether the exact optimum beat faiss.
        grid_cost: error on the grid over `kmeans_error`, less 1.
        zero_channels: output channels whose scale is 0.
        seconds: time taken.
        output_error: squared error of the layer's output over its square, on calibration tokens; None where the method
            does not look at it.
    """

    relative_error: float
    kmeans_error: float
    faiss_error: float
    optimum_won: bool
    grid_cost: float
    zero_channels: int
    seconds: float
    output_error: float | None = None

    @property
    def snr_db(self) -> float | None:
        """Signal-to-noise ratio in dB; None without noise."""
        return to_decibels(self.relative_error)

    def to_json(self) -> dict[str, Any]:
        """The layer's entry in the report; a ratio that does not exist is null."""
        return {
            "relative_error": self.relative_error,
            "snr_db": self.snr_db,
            "kmeans_error": self.kmeans_error,
            "faiss_error": self.faiss_error,
            "optimum_won": self.optimum_won,
            "grid_cost": self.grid_cost,
            "zero_channels": self.zero_channels,
            "output_error": self.output_error,
            "seconds": self.seconds,
        }


def no_centroids(size: int, grid: CodebookGrid) -> Codebook:
    """The codebook of nothing but zeros."""
    return Codebook(torch.zeros(size, dtype=torch.float16), 1.0 if grid == "int8" else 0.0)


def channel_scales(weight: Tensor, name: str) -> Tensor:
    """s_n = max|W[n, :]|, rounded to float16.

    Args:
        weight: float32 [N, K].
        name: the tensor's, for messages.

    Returns:
        float16 [N]; 0 for a channel of zeros.

    Raises:
        InputError: a weight is not finite, or too large for a float16 scale.
    """
    if not bool(weight.isfinite().all()):
        raise InputError(f"{name}: holds a value that is not finite; the checkpoint is damaged")
    largest = weight.abs().amax(dim=1)
    if float(largest.max()) > _LARGEST_HALF:
        found = f"{name}: weights up to {float(largest.max()):.3g} do not fit a float16 scale"
        raise InputError(f"{found}; normalise the model's weights")
    return largest.half()


def quantize_weight(
    weight: Tensor, bits: int, grid: CodebookGrid, name: str, seed: int = 0
) -> tuple[QuantizedWeight, WeightReport]:
    """K-Means over W / s_n of the whole matrix, each value weighing s_n**2, which is the error that counts.

    Args:
        weight: float [N, K].
        bits: n_W.
        grid: what the codebook's numbers lie on.
        name: the tensor's, for messages.
        seed: of faiss's initial draw.

    Raises:
        InputError: a weight is not finite or too large.
    """
    started = time.monotonic()
    weight = weight.float()
    scale = channel_scales(weight, name)
    wide = scale.float()[:, None]
    alive = scale > 0
    if not bool(alive.any()):
        codebook = no_centroids(2**bits, grid)
        index = torch.zeros(weight.shape, dtype=torch.uint8)
        report = WeightReport(0.0, 0.0, 0.0, False, 0.0, len(scale), time.monotonic() - started)
        return QuantizedWeight(index, codebook, scale.cpu()), report
    histogram = Histogram.empty()
    histogram.add((weight / wide)[alive], wide.square().expand_as(weight)[alive])
    points = histogram.points()
    found = cluster(points, (2**bits,), seed)[2**bits]
    line = Line(points)
    codebook = to_grid(line, found.centroids, grid, name)
    index = assign_indices(weight, scale.float(), codebook.centroids.to(weight.device))
    quantized = QuantizedWeight(index.cpu(), codebook, scale.cpu())
    weight = weight.cpu()
    error = (weight - quantized.dequantize()).double().square().sum() / weight.double().square().sum()
    on_grid = line.error(codebook.centroids.double().numpy())
    report = WeightReport(
        relative_error=float(error),
        kmeans_error=found.error,
        faiss_error=found.faiss_error,
        optimum_won=found.optimum_won,
        grid_cost=on_grid / found.error - 1 if found.error > 0 else 0.0,
        zero_channels=int((~alive).sum()),
        seconds=time.monotonic() - started,
    )
    return quantized, report
