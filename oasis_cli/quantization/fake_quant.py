"""The quantized linear layer made differentiable: what tuning by gradient runs in place of the integer one.

Forward gives the numbers of the format; backward lets gradients pass the rounding of activations unchanged (a
straight-through estimate), and gives those of centroids and scales exactly, indices being held fixed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from oasis_cli.numerics.codebook import GRID_LIMIT, Codebook, assign_indices
from oasis_cli.numerics.gemm import ActivationFormat, QuantizedWeight
from oasis_cli.numerics.outliers import beyond_thresholds, find_outliers
from oasis_cli.numerics.scale import token_scale


class _Gather(torch.autograd.Function):
    """codebook[index] * scale of each row."""

    @staticmethod
    def forward(ctx: Any, codebook: Tensor, scale: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(codebook, scale, index)
        return codebook.index_select(0, index.flatten().int()).view(index.shape).mul_(scale[:, None])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        codebook, scale, index = ctx.saved_tensors
        flat = index.flatten().int()
        gradient = gradients[0]
        of_scale = (gradient * codebook.index_select(0, flat).view(index.shape)).sum(dim=1)
        scaled = (gradient * scale[:, None]).flatten()
        of_codebook = torch.bincount(flat, weights=scaled, minlength=len(codebook)).to(codebook.dtype)
        return of_codebook, of_scale, None


class _QuantizeSite(torch.autograd.Function):
    """x̂ of x, float32 [M, K]; what stays for backward is a byte a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, centroids: Tensor, fmt: ActivationFormat) -> Tensor:
        if fmt.thresholds is not None:
            outliers = beyond_thresholds(x, fmt.thresholds)
        else:
            outliers = find_outliers(x, fmt.outliers_a_side)
        scale = token_scale(x, fmt.scale_kind, fmt.outliers_a_side)
        index = assign_indices(x, scale, centroids)
        quantized = centroids.index_select(0, index.flatten().int()).view(x.shape).mul_(scale[:, None])
        ctx.save_for_backward(scale, index.masked_fill_(outliers, len(centroids)))  # one centroid more than there are
        ctx.centroids = len(centroids)
        return torch.where(outliers, x, quantized)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        scale, index = ctx.saved_tensors
        scaled = (gradients[0] * scale[:, None]).flatten()
        of_codebook = torch.bincount(index.flatten().int(), weights=scaled, minlength=ctx.centroids + 1)
        return gradients[0], of_codebook[:-1].to(scale.dtype), None


class _Round(torch.autograd.Function):
    """To the codebook's grid, with the gradient passed on."""

    @staticmethod
    def forward(_ctx: FunctionCtx, values: Tensor, step: float) -> Tensor:
        if not step:
            return values.half().float()
        return (values / step).round().clamp(-GRID_LIMIT, GRID_LIMIT) * step

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class TunedCodebook(nn.Module):
    """Centroids that move, and the grid that they stay on.

    Args:
        codebook: to begin with.
        device: where it lives.
    """

    def __init__(self, codebook: Codebook, device: torch.device) -> None:
        super().__init__()
        self.step = codebook.step
        start = codebook.centroids.float().to(device)
        self.reach = max(float(start.abs().max()), 1e-12)
        self.moved = nn.Parameter(start / self.reach)  # of order one, so that one rate suits all

    def forward(self) -> Tensor:
        """Centroids on their grid, float32 [C], ascending."""
        rounded: Tensor = _Round.apply(self.moved * self.reach, self.step)
        ascending: Tensor = rounded.cummax(dim=0)[0]
        return ascending

    def ship(self) -> Tensor:
        """The centroids as they go to disk, float16 [C]; exact on the int8 grid."""
        with torch.no_grad():
            shipped: Tensor = self().cpu().half()
        return shipped


class TunedSite(nn.Module):
    """A site: one input quantized for all the layers that it feeds.

    Args:
        fmt: how the runtime quantizes it; None where it leaves it as it is.
        device: where it lives.
        compute: dtype of the layers' products.
    """

    codebook: TunedCodebook | None

    def __init__(self, fmt: ActivationFormat | None, device: torch.device, compute: torch.dtype) -> None:
        super().__init__()
        self.codebook = None if fmt is None else TunedCodebook(fmt.codebook, device)
        self.compute = compute
        self._fmt = fmt
        self._last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x̂, of x's shape, in the products' dtype; computed once for an input that several layers share."""
        if self.codebook is None or self._fmt is None:
            return x.to(self.compute)
        if self._last is None or self._last[0] is not x:
            flat = x.reshape(-1, x.shape[-1]).float()
            quantized: Tensor = _QuantizeSite.apply(flat, self.codebook(), self._fmt)
            self._last = x, quantized.view(x.shape).to(self.compute)
        found = self._last[1]
        return found

    def forget(self) -> None:
        """Let go of the last input, which holds its whole graph."""
        self._last = None


class TunedLinear(nn.Module):
    """A quantized layer with scales and codebook that move; its indices stay.

    Args:
        weight: as the blocks' pass left it.
        bias: float [N] or None.
        site: of its input.
        device: where it lives.
    """

    codebook: TunedCodebook
    index: Tensor
    start: Tensor
    bias: Tensor | None
    site: TunedSite

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, site: TunedSite, device: torch.device) -> None:
        super().__init__()
        self.codebook = TunedCodebook(weight.codebook, device)
        self.register_buffer("index", weight.index.to(device))
        self.register_buffer("start", weight.scale.float().to(device))
        self.register_buffer("bias", None if bias is None else bias.float())
        self.growth = nn.Parameter(torch.zeros_like(self.start))
        self.site = site

    def scale(self) -> Tensor:
        """s_n, float32 [N]; a channel of zeros stays one."""
        return self.start * self.growth.exp()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, float32 [..., N]."""
        weight: Tensor = _Gather.apply(self.codebook(), self.scale(), self.index)
        y = nn.functional.linear(self.site(x), weight.to(self.site.compute)).float()
        return y if self.bias is None else y + self.bias
