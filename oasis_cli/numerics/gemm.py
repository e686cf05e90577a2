"""The quantized linear layer, to the bit what every other implementation gives.

    y[n] = s_n * (s_t * sum_k LUT[i[k], j[n,k]] + sum_{k in outliers} r[k] * C_W[j[n,k]]) + bias[n]

The sum over LUT entries is exact (on the fp16 grid: see `main_branch`) and rounded once to float32, and so is the
compensation, which makes the result independent of the order of summation: by counts of concatenated indices (§III-B),
by integer products, or otherwise.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from oasis_cli.numerics.codebook import Codebook, assign_indices
from oasis_cli.numerics.lut import Lut, build_lut
from oasis_cli.numerics.outliers import beyond_thresholds, find_outliers
from oasis_cli.numerics.scale import ScaleKind, token_scale

# A float32 product of int8 integers summed over this many terms stays below 2**24, where float32 counts exactly.
_EXACT_K = (1 << 24) // (127 * 127)


@dataclass(frozen=True)
class ActivationFormat:
    """How a site's activations are quantized.

    Attributes:
        codebook: the site's centroids.
        scale_kind: which token scale.
        outliers_a_side: k, for dynamic outliers; 0 for none.
        thresholds: float32 [2], for static outliers; None otherwise.
    """

    codebook: Codebook
    scale_kind: ScaleKind = "absmax"
    outliers_a_side: int = 0
    thresholds: Tensor | None = None


@dataclass(frozen=True)
class QuantizedActivations:
    """A site's input after scaling, clustering and the outlier search.

    Attributes:
        index: uint8 [M, K].
        scale: s_t, float32 [M]; 0 for a zero token, NaN for one that is not finite.
        outliers: bool [M, K].
        residual: r, float32 [M, K]; 0 where there is no outlier.
    """

    index: Tensor
    scale: Tensor
    outliers: Tensor
    residual: Tensor


def quantize_activations(x: Tensor, fmt: ActivationFormat) -> QuantizedActivations:
    """Scale, cluster and search a site's input once for all the layers it feeds.

    Args:
        x: float [M, K]; float16 and bfloat16 are widened exactly.
        fmt: the site's format.

    Returns:
        Indices, scales, outliers and residuals of the M tokens.

    Raises:
        ValueError: the codebook descends, or 2k outliers do not fit K.
    """
    x = x.float()
    scale = token_scale(x, fmt.scale_kind, fmt.outliers_a_side)
    index = assign_indices(x, scale, fmt.codebook.centroids)
    if fmt.thresholds is not None:
        outliers = beyond_thresholds(x, fmt.thresholds)
    else:
        outliers = find_outliers(x, fmt.outliers_a_side)
    quantized = scale[:, None] * fmt.codebook.centroids.float()[index.int()]
    residual = torch.where(outliers, x - quantized, 0.0)
    return QuantizedActivations(index, scale, outliers, residual)


def dequantized(x: Tensor, fmt: ActivationFormat) -> Tensor:
    """x̂: what the runtime makes of x, float32 of the same shape; outliers are kept."""
    flat = x.reshape(-1, x.shape[-1]).float()
    act = quantize_activations(flat, fmt)
    levels = fmt.codebook.centroids.float().to(x.device)
    return torch.where(act.outliers, flat, act.scale[:, None] * levels[act.index.int()]).reshape(x.shape)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight matrix as indices.

    Attributes:
        index: j, uint8 [N, K].
        codebook: C_W.
        scale: s_n, float16 [N].
        bias: float [N] or None.
    """

    index: Tensor
    codebook: Codebook
    scale: Tensor
    bias: Tensor | None = None

    @cached_property
    def integers(self) -> Tensor:
        """The int8 grid's integers of C_W[j], int8 [N, K]; kept, since every call needs them."""
        return self.codebook.integers[self.index.int()]

    @property
    def centroids(self) -> Tensor:
        """C_W[j], float32 [N, K]."""
        if self.codebook.step:
            return self.integers.float() * self.codebook.step  # exact: seven bits times four
        return self.codebook.centroids.float()[self.index.int()]

    def dequantize(self) -> Tensor:
        """s_n * C_W[j], float32 [N, K]."""
        return self.scale.float()[:, None] * self.centroids


def main_branch(act: QuantizedActivations, act_codebook: Codebook, weight: QuantizedWeight) -> Tensor:
    """Sum of LUT entries over k times the LUT's step, rounded once.

    Args:
        act: the site's input, M tokens of K channels.
        act_codebook: C_A.
        weight: N output channels of K.

    Returns:
        float32 [M, N]. On the int8 grid the sum is exact before it is rounded; on the fp16 grid it is good to 1e-8 at
        K = 11008 and exact for short layers.

    Raises:
        ValueError: one codebook is on the int8 grid and the other is not.
    """
    lut = build_lut(act_codebook, weight.codebook)
    if act_codebook.step:
        total = _integer_product(act_codebook.integers[act.index.int()], weight.integers)
    else:
        total = _rounded_product(act.index, weight, act_codebook, lut)
    return (total * lut.step).float()


def _integer_product(act: Tensor, weight: Tensor) -> Tensor:
    """Exact product of int8 [M, K] and [N, K], float64 [M, N], through float32 GEMMs short enough to be exact."""
    K = act.shape[1]
    total = torch.zeros(act.shape[0], weight.shape[0], dtype=torch.float64, device=act.device)
    for start in range(0, K, _EXACT_K):
        part = slice(start, start + _EXACT_K)
        total += act[:, part].float() @ weight[:, part].float().T
    return total


def _rounded_product(act_index: Tensor, weight: QuantizedWeight, act_codebook: Codebook, lut: Lut) -> Tensor:
    """Sum of LUT entries that were rounded to float16: the plain product, plus what the rounding changed.

    Both parts are sums of float16 products and their differences, which float64 holds without rounding that matters.
    One masked GEMM for every activation level: exact, and slow.
    """
    act_levels, weight_levels = act_codebook.centroids.double(), weight.codebook.centroids.double()
    total = act_levels[act_index.int()] @ weight_levels[weight.index.int()].T
    error = lut.table(len(weight_levels)) - act_levels[:, None] * weight_levels[None, :]
    for level in range(len(act_levels)):
        total += (act_index == level).double() @ error[level][weight.index.int()].T
    return total


def error_compensation(act: QuantizedActivations, weight: QuantizedWeight) -> Tensor:
    """The outlier branch (§III-C): residuals times centroids, summed in float64 and rounded once to float32 [M, N]."""
    if act.residual.shape[0] <= _FEW_TOKENS:
        return _sparse_compensation(act, weight)
    return (act.residual.double() @ weight.centroids.double().T).float()


# Up to here, gathering the outliers' columns costs less than a dense product; both give the same bits.
_FEW_TOKENS = 4


def _sparse_compensation(act: QuantizedActivations, weight: QuantizedWeight) -> Tensor:
    """`error_compensation` of a few tokens over the channels that hold an outlier at all."""
    channels = act.outliers.any(dim=0).nonzero().squeeze(1)
    columns = weight.codebook.centroids.double()[weight.index[:, channels].int()]
    return (act.residual[:, channels].double() @ columns.T).float()


def oasis_linear(x: Tensor, fmt: ActivationFormat, weight: QuantizedWeight) -> Tensor:
    """The whole layer on float activations.

    Args:
        x: float [..., K].
        fmt: how the site's activations are quantized.
        weight: the layer's weights.

    Returns:
        [..., N] in the dtype of x. A zero token gives the bias; a token with a value that is not finite gives NaN.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = apply_weight(quantize_activations(flat, fmt), fmt.codebook, weight)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.index.shape[0])


def apply_weight(act: QuantizedActivations, act_codebook: Codebook, weight: QuantizedWeight) -> Tensor:
    """Both branches and their merge for activations that are quantized already.

    Args:
        act: the site's input, M tokens of K channels.
        act_codebook: C_A.
        weight: N output channels of K, with scales and bias.

    Returns:
        float32 [M, N].
    """
    main, compensation = main_branch(act, act_codebook, weight), error_compensation(act, weight)
    scaled = act.scale[:, None] * main
    y = (scaled + compensation) * weight.scale.float()
    return y if weight.bias is None else y + weight.bias.float()
