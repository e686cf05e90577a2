"""One matrix of `oasis-plus`: numbers of the paper's format, chosen for the error of the layer's output."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from oasis_cli.numerics.codebook import CodebookGrid
from oasis_cli.numerics.gemm import QuantizedWeight
from oasis_cli.quantization.error_feedback import ErrorFeedback, damped
from oasis_cli.quantization.kmeans_weights import WeightReport, channel_scales, quantize_weight
from oasis_cli.quantization.refine import alternate, fit_scales, output_errors

_ROUNDS = 3
_PASSES = 2


class SiteSolver:
    """What the layers of one site share: H and its factor for the error feedback.

    Args:
        moments: H = sum of x̂ x̂ᵀ, [K, K].
        damping: added to the diagonal, as a share of its mean.
    """

    def __init__(self, moments: Tensor, damping: float) -> None:
        self.hessian = damped(moments, damping)
        self.feedback = ErrorFeedback(self.hessian)


def quantize_for_output(
    weight: Tensor, solver: SiteSolver, bits: int, grid: CodebookGrid, name: str, seed: int = 0
) -> tuple[QuantizedWeight, WeightReport]:
    """Alternate scales and centroids, then assign indices with error feedback and fit the scales again, twice.

    Args:
        weight: W, float [N, K].
        solver: of the layer's site.
        bits: n_W.
        grid: what the codebook's numbers lie on.
        name: the tensor's, for messages.
        seed: of faiss's initial draw.

    Returns:
        Never worse, by tr((W - Ŵ) H (W - Ŵ)ᵀ), than plain K-Means of W; and how good.

    Raises:
        InputError: a weight is not finite or too large.
    """
    started = time.monotonic()
    weight, hessian = weight.float(), solver.hessian
    plain, report = quantize_weight(weight, bits, grid, name, seed)
    target = weight.to(hessian.device)
    best, least = plain, output_errors(target - plain.dequantize().to(target.device), hessian)
    scale = channel_scales(target, name).where(plain.scale.to(target.device) > 0, 0.0)
    if bool((scale > 0).any()):
        refined, errors = _refine(target, scale, solver, bits, grid, name, seed)
        if float(errors.sum()) < float(least.sum()):
            best, least = refined, errors
    signal = float(output_errors(target, hessian).sum())
    error = (weight.cpu() - best.dequantize()).double().square().sum() / weight.double().square().sum().cpu()
    return best, replace(
        report,
        relative_error=float(error) if plain.scale.any() else 0.0,
        output_error=float(least.sum()) / signal if signal > 0 else 0.0,
        seconds=time.monotonic() - started,
    )


def _refine(
    target: Tensor, scale: Tensor, solver: SiteSolver, bits: int, grid: CodebookGrid, name: str, seed: int
) -> tuple[QuantizedWeight, Tensor]:
    """The refined matrix, on the CPU, and the errors of its output channels, float64 [N]."""
    hessian = solver.hessian
    codebook, scale = alternate(target, hessian.diagonal(), scale, bits, grid, name, seed, _ROUNDS)
    levels = codebook.centroids.to(target.device).float()
    index = torch.zeros(target.shape, dtype=torch.uint8, device=target.device)
    errors = torch.full(scale.shape, torch.inf, dtype=torch.float64, device=target.device)
    kept = scale
    for _ in range(_PASSES):
        found = solver.feedback.assign(target, scale, codebook)
        centroids = levels[found.int()]
        scale = fit_scales(target, centroids, hessian, scale)
        reached = output_errors(target - scale.float()[:, None] * centroids, hessian)
        better = reached < errors
        index = torch.where(better[:, None], found, index)
        kept, errors = torch.where(better, scale, kept), torch.minimum(reached, errors)
    return QuantizedWeight(index.cpu(), codebook, kept.cpu()), errors
