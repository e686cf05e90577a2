import math

import numpy as np
import pytest
import torch

from oasis_cli.errors import InputError
from oasis_cli.quantization.kmeans_weights import channel_scales, quantize_weight


def test_scales_are_the_largest_magnitudes_in_float16() -> None:
    weight = torch.tensor([[0.1, -0.3], [0.0, 0.0], [2.0, 1.0]])
    assert channel_scales(weight, "w").tolist() == [float(np.float16(0.3)), 0.0, 2.0]


def test_weights_beyond_float16_are_refused_with_the_cure() -> None:
    with pytest.raises(InputError, match=r"^w: weights up to 7e\+04 do not fit .*; normalise the model's weights$"):
        channel_scales(torch.tensor([[7e4, 1.0]]), "w")


@pytest.mark.parametrize("grid", ["int8", "fp16"])
def test_by_hand(grid: str) -> None:
    """Two channels, scales 4 and 1; W / s_n takes the values -1, -0.5, 0.5 and 1, which four centroids hold exactly."""
    weight = torch.tensor([[4.0, -4.0, 2.0, 2.0], [0.5, 1.0, -0.5, -0.5]])
    quantized, report = quantize_weight(weight, 2, grid, "w")  # type: ignore[arg-type]
    assert quantized.scale.tolist() == [4.0, 1.0]
    assert quantized.codebook.centroids.tolist() == [-1.0, -0.5, 0.5, 1.0]
    assert quantized.index.tolist() == [[3, 0, 2, 2], [2, 3, 1, 1]]
    assert torch.equal(quantized.dequantize(), weight)
    assert report.relative_error == 0
    assert report.snr_db is None


def test_values_weigh_their_channels_scale_squared() -> None:
    """Two channels with scales 4 and 1: their values weigh 16 and 1."""
    weight = torch.tensor([[4.0, 0.0], [1.0, 1.0]])  # W / s: 1, 0 (16 each), 1, 1 (1 each)
    quantized, _ = quantize_weight(weight, 1, "fp16", "w")
    assert quantized.codebook.centroids.tolist() == [0.0, 1.0]
    weight = torch.tensor(
        [[4.0, 2.0, 0.0], [1.0, 1.0, 1.0]]
    )  # two clusters of 1, 0.5, 0 (16 each) and three 1s (1 each)
    quantized, _ = quantize_weight(weight, 1, "fp16", "w")
    # {0} and {0.5, 1, 1, 1, 1}: (16 * 0.5 + 19) / 35 with an error of 16 * 19 / 35 * 0.25 = 2.17;
    # {0, 0.5} and {1, ...}: 0.25 with 16 * 2 * 0.0625 = 2.0, the better
    assert quantized.codebook.centroids.tolist() == [0.25, 1.0]


def test_indices_are_nearest_by_brute_force() -> None:
    weight = torch.randn(12, 31, generator=torch.Generator().manual_seed(4))
    quantized, report = quantize_weight(weight, 3, "int8", "w")
    levels = quantized.scale.double()[:, None] * quantized.codebook.centroids.double()[None, :]
    distance = (weight.double()[:, :, None] - levels[:, None, :]).abs()
    assert torch.equal(distance.argmin(-1).to(torch.uint8), quantized.index)
    expected = distance.min(-1).values.square().sum() / weight.double().square().sum()
    assert report.relative_error == pytest.approx(float(expected), rel=1e-6)
    assert report.snr_db == pytest.approx(-10 * math.log10(float(expected)), rel=1e-6)


def test_within_half_a_percent_of_a_long_lloyd_run() -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(5))
    quantized, _ = quantize_weight(weight, 4, "int8", "w")
    scale = quantized.scale.double()[:, None]
    values, weights = (weight / scale).flatten().numpy(), scale.square().expand_as(weight).flatten().numpy()

    def price(centroids: np.ndarray) -> float:
        return float(weights @ np.abs(values[:, None] - centroids[None]).min(1) ** 2)

    ours = quantized.codebook.centroids.double().numpy()
    best = price(ours)
    for start in (ours, np.quantile(values, (np.arange(16) + 0.5) / 16), np.linspace(values.min(), values.max(), 16)):
        centroids = start.copy()
        for _ in range(400):
            nearest = np.abs(values[:, None] - centroids[None]).argmin(1)
            mass = np.bincount(nearest, weights, 16)
            centroids = np.where(
                mass > 0, np.bincount(nearest, weights * values, 16) / np.maximum(mass, 1e-30), centroids
            )
        best = min(best, price(centroids))
    assert price(ours) <= 1.005 * best


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (3, 3)])
def test_small_and_odd_matrices(shape: tuple[int, int]) -> None:
    quantized, report = quantize_weight(torch.randn(shape), 4, "int8", "w")
    assert quantized.index.shape == shape
    assert report.relative_error < 0.01


def test_zero_channels_and_matrices_stay_zero() -> None:
    weight = torch.randn(4, 6)
    weight[2] = 0
    quantized, report = quantize_weight(weight, 4, "int8", "w")
    assert report.zero_channels == 1
    assert not quantized.dequantize()[2].any()
    nothing, report = quantize_weight(torch.zeros(3, 5), 4, "int8", "w")
    assert not nothing.dequantize().any()
    assert report.zero_channels == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e6])
def test_impossible_weights_name_the_tensor(bad: float) -> None:
    weight = torch.randn(3, 4)
    weight[1, 1] = bad
    with pytest.raises(InputError, match=r"layers\.3\.q\.weight"):
        quantize_weight(weight, 4, "int8", "layers.3.q.weight")
