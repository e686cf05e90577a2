"""Scales and centroids by alternating least squares: each is the best there is for what the other ones are.

The error that counts is that of a layer's output. With H = sum of x xᵀ over calibration tokens it is
tr((W - Ŵ) H (W - Ŵ)ᵀ), a sum over output channels. Before indices are fixed H's diagonal stands for H: an importance of
each input channel, and K-Means stays exact. Once they are fixed the best scale follows from H itself.
"""

import torch
from torch import Tensor

from oasis_cli.numerics.codebook import Codebook, CodebookGrid, assign_indices
from oasis_cli.numerics.grid import to_grid
from oasis_cli.numerics.histogram import Histogram
from oasis_cli.numerics.kmeans import Line, cluster, lloyd

_LARGEST_HALF = 65504.0


def output_errors(residual: Tensor, hessian: Tensor) -> Tensor:
    """(w - ŵ) H (w - ŵ)ᵀ of every output channel.

    Args:
        residual: W - Ŵ, float [N, K].
        hessian: float64 [K, K], or its diagonal [K].

    Returns:
        float64 [N].
    """
    wide = residual.double()
    return ((wide @ hessian if hessian.dim() == 2 else wide * hessian) * wide).sum(dim=1)


def fit_scales(weight: Tensor, centroids: Tensor, hessian: Tensor, scale: Tensor) -> Tensor:
    """The best scale of every output channel for its centroids, s = (w H cᵀ) / (c H cᵀ), rounded to float16.

    Args:
        weight: W, float [N, K].
        centroids: C_W[j], float [N, K].
        hessian: float64 [K, K], or its diagonal [K].
        scale: the scales so far, float16 [N].

    Returns:
        float16 [N]; a channel keeps its scale where the new one, rounded, is no better or not positive.
    """
    wide = centroids.double()
    reach = wide @ hessian if hessian.dim() == 2 else wide * hessian
    power, match = (reach * wide).sum(dim=1), (reach * weight.double()).sum(dim=1)
    best = torch.where(power > 0, match / power, 0.0).clamp(max=_LARGEST_HALF).half()
    # without what does not depend on s: s² c H cᵀ - 2 s w H cᵀ
    cost = [s.double().square() * power - 2 * s.double() * match for s in (best, scale)]
    return torch.where((best > 0) & (scale > 0) & (cost[0] < cost[1]), best, scale)


def alternate(
    weight: Tensor, importance: Tensor, scale: Tensor, bits: int, grid: CodebookGrid, name: str, seed: int, rounds: int
) -> tuple[Codebook, Tensor]:
    """Codebook and scales by turns: K-Means of W / s_n, each value weighing s_n² h_k, then the best scales for it.

    Args:
        weight: W, float32 [N, K].
        importance: h, the diagonal of H, float64 [K], positive.
        scale: scales to begin with, float16 [N]; channels of scale 0 are left out and stay so.
        bits: n_W.
        grid: what the centroids are put on, before the last scales are found.
        name: the tensor's, for messages.
        seed: of faiss's initial draw.
        rounds: how often.

    Returns:
        Codebook on its grid, and float16 scales [N].
    """
    alive = scale > 0
    # only their ratios matter, and float32 holds their squares only so far out
    relative = (importance / importance.mean()).float()
    centroids = None
    for number in range(rounds):
        wide = scale.float()[:, None]
        histogram = Histogram.empty()
        histogram.add((weight / wide)[alive], (wide.square() * relative)[alive])
        line = Line(histogram.points())
        if centroids is None:
            centroids = cluster(histogram.points(), (2**bits,), seed)[2**bits].centroids
        else:
            centroids = lloyd(line, centroids)
        if number == rounds - 1:
            codebook = to_grid(line, centroids, grid, name)
        else:
            codebook = Codebook(torch.from_numpy(centroids).half())
        levels = codebook.centroids.to(weight.device)
        index = assign_indices(weight, scale.float(), levels)
        scale = fit_scales(weight, levels.float()[index.int()], importance, scale)
    return codebook, scale
