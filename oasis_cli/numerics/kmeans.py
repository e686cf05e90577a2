"""Weighted K-Means on a line: faiss, polished by exact Lloyd steps, held against the true optimum.

In one dimension clusters are intervals of the sorted points, so prefix sums price any interval at once and a dynamic
program over the points finds the best partition. faiss alone stops in local minima (several percent above).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

from oasis_cli.numerics.histogram import Points

_FAISS_ITERATIONS = 25
_LLOYD_STEPS = 100

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Clustering:
    """Centroids and how they were found.

    Attributes:
        centroids: float64 [clusters], ascending; repeated at the end where there are fewer distinct points.
        error: weighted squared error of the points.
        faiss_error: the same of faiss after Lloyd steps; equal to `error` where faiss found the optimum.
    """

    centroids: Floats
    error: float
    faiss_error: float

    @property
    def optimum_won(self) -> bool:
        """Whether the dynamic program was better than faiss by more than rounding."""
        return self.error < self.faiss_error * (1 - 1e-9)


class Line:
    """Points with the prefix sums that price intervals.

    Values are taken about their weighted mean, so that little is lost where sums are subtracted.
    """

    def __init__(self, points: Points) -> None:
        order = np.argsort(points.values, kind="stable")
        values, weights = points.values[order], points.weights[order] / points.weights.sum()
        self.offset = float(values @ weights)
        self.values = values - self.offset
        zero = np.zeros(1)
        self.s0 = np.concatenate([zero, np.cumsum(weights)])
        self.s1 = np.concatenate([zero, np.cumsum(weights * self.values)])
        self.s2 = np.concatenate([zero, np.cumsum(weights * self.values**2)])

    def interval_cost(self, start: Ints, stop: Ints) -> Floats:
        """Weighted squared error of points[start:stop] about their mean, for n intervals: int64 [n] to float64 [n]."""
        weight, moment = self.s0[stop] - self.s0[start], self.s1[stop] - self.s1[start]
        squares = self.s2[stop] - self.s2[start]
        with np.errstate(invalid="ignore", divide="ignore"):
            cost = squares - moment**2 / weight
        return np.where(weight > 0, np.maximum(cost, 0.0), 0.0)

    def cut(self, centroids: Floats) -> Ints:
        """Interval ends, int64 [C + 1], of the points nearest to each of the ascending centroids, float64 [C]."""
        middles = (centroids[1:] + centroids[:-1]) / 2
        inner = np.searchsorted(self.values, middles - self.offset, side="left")
        return np.concatenate([[0], inner, [len(self.values)]]).astype(np.int64)

    def means(self, cuts: Ints, otherwise: Floats) -> Floats:
        """Mean of every interval between `cuts`, int64 [C + 1]; where one is empty, `otherwise`, float64 [C], stays."""
        weight, moment = np.diff(self.s0[cuts]), np.diff(self.s1[cuts])
        full = weight > 0
        mean = np.divide(moment, weight, out=np.zeros_like(moment), where=full) + self.offset
        return np.where(full, mean, otherwise)

    def error(self, centroids: Floats) -> float:
        """Weighted mean squared error of all points to the nearest of the ascending centroids, float64 [C]."""
        cuts, shifted = self.cut(centroids), centroids - self.offset
        weight, moment = np.diff(self.s0[cuts]), np.diff(self.s1[cuts])
        squares = np.diff(self.s2[cuts])
        return float(np.sum(squares - 2 * shifted * moment + shifted**2 * weight))


def lloyd(line: Line, centroids: Floats, steps: int = _LLOYD_STEPS) -> Floats:
    """Alternate nearest points and means until nothing moves, `steps` times at most; float64 [C], ascending."""
    for _ in range(steps):
        moved = np.sort(line.means(line.cut(centroids), centroids))
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids


def optimal_cuts(line: Line, clusters: int) -> list[Ints]:
    """Interval ends of the best partitions into 1, 2, ... `clusters` clusters, by dynamic programming.

    best[c][j] = min over i of best[c-1][i] + cost(i, j). The minimising i grows with j, so each row is found by
    halving: all middles of one level at a time, each searching only between its neighbours' minimisers.
    """
    n = len(line.values)
    best = line.interval_cost(np.zeros(n + 1, dtype=np.int64), np.arange(n + 1))
    choices: list[Ints] = [np.zeros(n + 1, dtype=np.int64)]
    for _ in range(1, clusters):
        best, choice = _next_row(line, best)
        choices.append(choice)
    partitions = []
    for count in range(1, clusters + 1):
        cuts = [n]
        for row in range(count - 1, -1, -1):
            cuts.append(int(choices[row][cuts[-1]]))
        partitions.append(np.array(cuts[::-1], dtype=np.int64))
    return partitions


def _next_row(line: Line, previous: Floats) -> tuple[Floats, Ints]:
    """One row of the dynamic program and its minimisers, [n + 1] each."""
    n = len(previous) - 1
    row, choice = np.zeros(n + 1), np.zeros(n + 1, dtype=np.int64)
    left, right = np.array([0]), np.array([n])
    low, high = np.array([0]), np.array([n])
    while len(left):
        middle = (left + right) // 2
        row[middle], choice[middle] = _segment_minima(line, previous, middle, low, np.minimum(high, middle))
        found = choice[middle]
        left, right = np.concatenate([left, middle + 1]), np.concatenate([middle - 1, right])
        low, high = np.concatenate([low, found]), np.concatenate([found, high])
        keep = left <= right
        left, right, low, high = left[keep], right[keep], low[keep], high[keep]
    return row, choice


def _segment_minima(line: Line, previous: Floats, stop: Ints, low: Ints, high: Ints) -> tuple[Floats, Ints]:
    """For every `stop`, the least previous[i] + cost(i, stop) over low <= i <= high, and its first i."""
    lengths = high - low + 1
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    i = np.arange(lengths.sum()) - np.repeat(starts - low, lengths)
    total = previous[i] + line.interval_cost(i, np.repeat(stop, lengths))
    least = np.minimum.reduceat(total, starts)
    first = np.flatnonzero(total == np.repeat(least, lengths))
    owner = np.searchsorted(starts, first, side="right") - 1
    _, position = np.unique(owner, return_index=True)
    return least, i[first[position]]


def cluster(points: Points, sizes: tuple[int, ...], seed: int = 0) -> dict[int, Clustering]:
    """K-Means for several numbers of clusters; one dynamic program serves them all.

    Args:
        points: weighted points, at least one.
        sizes: numbers of clusters.
        seed: of faiss's initial draw.

    Returns:
        The best clustering found of each size.

    Raises:
        ValueError: no points.
    """
    if not len(points.values):
        raise ValueError("K-Means needs at least one point")
    line = Line(points)
    partitions = optimal_cuts(line, min(max(sizes), len(line.values)))
    result = {}
    for size in sizes:
        if size >= len(line.values):
            distinct = np.sort(points.values)
            centroids = np.concatenate([distinct, np.repeat(distinct[-1], size - len(distinct))])
            result[size] = Clustering(centroids, 0.0, 0.0)
            continue
        optimum = line.means(partitions[size - 1], np.zeros(size))
        optimum = lloyd(line, optimum)
        found = lloyd(line, _faiss_centroids(points, size, seed))
        errors = line.error(optimum), line.error(found)
        result[size] = Clustering(optimum if errors[0] <= errors[1] else found, min(errors), errors[1])
    return result


@contextmanager
def _one_faiss_thread() -> Iterator[None]:
    """A few thousand points are done before a second thread has woken up: with two it takes ten times as long."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def _faiss_centroids(points: Points, size: int, seed: int) -> Floats:
    """Faiss's weighted K-Means over all points, ascending."""
    scale = float(np.abs(points.values).max()) or 1.0
    kmeans = faiss.Kmeans(
        1,
        size,
        niter=_FAISS_ITERATIONS,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(points.values),
    )
    weights = points.weights / points.weights.mean()
    with _one_faiss_thread():
        kmeans.train((points.values / scale).astype(np.float32)[:, None], weights=weights.astype(np.float32))
    return np.sort(np.asarray(kmeans.centroids, dtype=np.float64)[:, 0]) * scale
