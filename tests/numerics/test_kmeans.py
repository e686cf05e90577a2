"""K-Means on a line, against exhaustive search and against data that was never binned."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_cli.numerics.grid import to_grid
from oasis_cli.numerics.histogram import Histogram, Points
from oasis_cli.numerics.kmeans import Line, cluster


def exhaustive(values: np.ndarray, weights: np.ndarray, clusters: int) -> float:
    """Least weighted squared error over all ways to cut the sorted points, per unit of weight."""
    order = np.argsort(values)
    v, w = values[order], weights[order] / weights.sum()
    best = np.inf
    for cuts in combinations(range(1, len(v)), clusters - 1):
        parts = np.split(np.arange(len(v)), cuts)
        best = min(best, sum(float(w[p] @ (v[p] - np.average(v[p], weights=w[p])) ** 2) for p in parts))
    return float(best)


POINTS = st.lists(
    st.tuples(st.floats(-10, 10, allow_subnormal=False), st.floats(0.01, 10)),
    min_size=1,
    max_size=9,
    unique_by=lambda p: p[0],
)


@settings(max_examples=60, deadline=None)
@given(POINTS, st.integers(1, 4))
def test_finds_the_exhaustive_optimum(points: list[tuple[float, float]], clusters: int) -> None:
    values, weights = np.array(sorted(points)).T
    found = cluster(Points(values, weights), (clusters,))[clusters]
    assert len(found.centroids) == clusters
    assert (np.diff(found.centroids) >= 0).all()
    expected = exhaustive(values, weights, min(clusters, len(values)))
    assert found.error == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.faiss_error >= found.error - 1e-12


def test_by_hand() -> None:
    found = cluster(Points(np.array([0.0, 1.0, 10.0, 11.0]), np.array([1.0, 3.0, 1.0, 1.0])), (1, 2))
    assert found[2].centroids.tolist() == pytest.approx([0.75, 10.5])
    assert found[2].error == pytest.approx((0.5625 + 0.1875 + 0.5) / 6)
    assert found[1].centroids.tolist() == pytest.approx([4.0])


def test_fewer_distinct_points_than_clusters_repeat_the_last() -> None:
    found = cluster(Points(np.array([-1.0, 2.0]), np.array([1.0, 1.0])), (4,))[4]
    assert found.centroids.tolist() == [-1.0, 2.0, 2.0, 2.0]
    assert found.error == 0


def test_no_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        cluster(Points(np.array([]), np.array([])), (2,))


@pytest.mark.parametrize("seed", range(3))
def test_binning_costs_next_to_nothing(seed: int) -> None:
    """The centroids found on the histogram, priced on every single value, are within 0.1 % of a long Lloyd run."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(20_000, generator=generator) * torch.rand(20_000, generator=generator).mul(3).exp() / 60
    weights = torch.rand(20_000, generator=generator).square()
    histogram = Histogram.empty()
    histogram.add(values, weights)
    centroids = cluster(histogram.points(), (16,))[16].centroids
    exact = Line(Points(values.double().numpy(), weights.double().numpy()))
    polished = centroids
    for _ in range(300):
        polished = exact.means(exact.cut(polished), polished)
    assert exact.error(centroids) <= 1.001 * exact.error(polished)


def test_histogram_keeps_sums_and_adds_up() -> None:
    values = torch.tensor([0.5, 0.5, -2.0, 0.0, 1e-9, -1e-9])
    weights = torch.tensor([1.0, 3.0, 2.0, 5.0, 1.0, 1.0])
    whole, parts = Histogram.empty(), Histogram.empty()
    whole.add(values, weights)
    for value, weight in zip(values, weights, strict=True):
        parts.add(value[None], weight[None])
    for name in ("count", "weight", "moment"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    points = whole.points()
    assert points.values.tolist() == [-2.0, 0.0, 0.5]  # what lies below 2**-24 shares one bin; its mean is 0 here
    assert points.weights.tolist() == [2.0, 7.0, 4.0]


def test_values_left_out_do_not_count() -> None:
    some, all_but = Histogram.empty(), Histogram.empty()
    values, weights = torch.tensor([[0.5, -3.0], [1.0, 2.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    leave_out = torch.tensor([[False, True], [True, False]])
    some.add(values, weights, leave_out)
    all_but.add(values[~leave_out], weights[~leave_out])
    for name in ("count", "weight", "moment"):
        assert torch.equal(getattr(some, name), getattr(all_but, name))


def test_without_any_weight_values_count_alike() -> None:
    histogram = Histogram.empty()
    histogram.add(torch.tensor([1.0, 1.0, 3.0]), torch.zeros(3))
    points = histogram.points()
    assert points.values.tolist() == pytest.approx([1.0, 3.0], rel=2**-8)
    assert points.weights.tolist() == [2.0, 1.0]


def test_bins_are_never_wider_than_one_part_in_256() -> None:
    values = torch.linspace(0.001, 1.0, 5001)
    histogram = Histogram.empty()
    histogram.add(values, torch.ones(5001))
    found = histogram.points().values
    nearest = np.abs(found[None, :] - values.double().numpy()[:, None]).min(axis=1)
    assert (nearest / values.numpy() <= 2**-8).all()


@pytest.mark.parametrize("grid", ["int8", "fp16"])
@given(st.integers(0, 200), st.floats(-9, 3))
@settings(max_examples=40, deadline=None)
def test_grids_hold_what_they_promise(grid: str, seed: int, magnitude: float) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(4, 400) * 10.0**magnitude
    line = Line(Points(values, np.ones(400)))
    centroids = np.sort(rng.choice(values, 8, replace=False))
    codebook = to_grid(line, centroids, grid, "w")  # type: ignore[arg-type]
    stored = codebook.centroids.double().numpy()
    assert codebook.centroids.dtype == torch.float16
    assert (np.diff(stored) >= 0).all()
    if grid == "int8":
        assert (codebook.integers.double().numpy() * codebook.step == stored).all()
    else:
        assert (stored == centroids.astype(np.float16)).all()


def test_int8_grid_costs_little_where_float16_has_room() -> None:
    rng = np.random.default_rng(0)
    line = Line(Points(rng.standard_normal(5000), np.ones(5000)))
    centroids = cluster(Points(rng.standard_normal(5000), np.ones(5000)), (16,))[16].centroids
    codebook = to_grid(line, centroids, "int8", "w")
    assert line.error(codebook.centroids.double().numpy()) <= 1.005 * line.error(centroids)


def test_a_codebook_of_zeros_has_a_grid_too() -> None:
    codebook = to_grid(Line(Points(np.zeros(1), np.ones(1))), np.zeros(4), "int8", "w")
    assert codebook.integers.tolist() == [0, 0, 0, 0]
