"""Putting centroids on the grid they are shipped on: float16, or integers of int8 times one step.

On the int8 grid every product of two centroids is an integer of 15 bits, so LUT entries and their sums are exact and
every implementation gives the same bits. The step has at most four significant bits: integer * step then needs eleven
at most, and every centroid is an exact float16 as well.
"""

import math

import numpy as np
import torch

from oasis_cli.errors import InputError
from oasis_cli.numerics.codebook import GRID_LIMIT, Codebook, CodebookGrid
from oasis_cli.numerics.kmeans import Floats, Line

_SIGNIFICANDS = range(8, 16)
_OCTAVES = 2
_SMALLEST_HALF = 2.0**-24
_LARGEST_HALF = 65504.0


def to_grid(line: Line, centroids: Floats, grid: CodebookGrid, where: str) -> Codebook:
    """Round centroids to the grid, on int8 choosing the step with the least error of the points.

    Args:
        line: the points that the centroids stand for.
        centroids: float64 [C], ascending.
        grid: `int8` or `fp16`.
        where: what to call the matrix or site in a message.

    Raises:
        InputError: the centroids lie outside what float16 holds.
    """
    largest = float(np.abs(centroids).max())
    if largest > _LARGEST_HALF:
        raise InputError(f"{where}: centroids up to {largest:.3g} do not fit float16; normalise the model's weights")
    if grid == "fp16":
        return Codebook(torch.from_numpy(centroids).half())
    candidates = [_on_step(line, centroids, step) for step in _steps(largest)]
    _, integers, step = min(candidates, key=lambda candidate: candidate[0])
    return Codebook(torch.from_numpy(integers * step).half(), step)


def _steps(largest: float) -> list[float]:
    """Steps worth trying: two octaves to either side of the one that just reaches the largest centroid.

    A finer step cuts the outermost centroids short and serves the many small ones better; a coarser one may happen
    to lie well. All keep every centroid an exact float16, which ends at multiples of 2**-24.
    """
    if largest == 0:
        return [1.0]
    exponent = math.floor(math.log2(largest / GRID_LIMIT)) - 3
    steps = [m * 2.0 ** (exponent + octave) for octave in range(-_OCTAVES, _OCTAVES + 1) for m in _SIGNIFICANDS]
    return [step for step in steps if step % _SMALLEST_HALF == 0] or [_SMALLEST_HALF]


def _on_step(line: Line, centroids: Floats, step: float) -> tuple[float, Floats, float]:
    """Lloyd steps with means rounded to multiples of `step`, for as long as they help."""
    best = np.clip(np.round(centroids / step), -GRID_LIMIT, GRID_LIMIT)
    error = line.error(best * step)
    while True:
        means = line.means(line.cut(best * step), best * step)
        moved = np.sort(np.clip(np.round(means / step), -GRID_LIMIT, GRID_LIMIT))
        moved_error = line.error(moved * step)
        if moved_error >= error:
            return error, best, step
        best, error = moved, moved_error
