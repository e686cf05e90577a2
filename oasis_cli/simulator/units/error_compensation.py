"""The outlier branch (§III-C2): the Error Calculation Unit, the Dequantization Units and the MACs."""

import torch
from torch import Tensor

from oasis_cli.simulator.units.outlier_set import OutlierSet


def residuals(x: Tensor, token_scale: Tensor, index: Tensor, codebook: Tensor, outliers: OutlierSet) -> Tensor:
    """Error Calculation Unit: r = x - s_t·C_A[i] at the outliers, each step rounded once.

    Args:
        x: activations, float32 [M, K].
        token_scale: s_t, float32 [M].
        index: i, uint8 [M, K].
        codebook: C_A, float16 [2**n_A].
        outliers: P channels a token.

    Returns:
        float32 [M, P]; 0 where an entry of `outliers` is not valid.
    """
    nearest = codebook.float()[index.gather(1, outliers.channels).long()]
    residual = x.gather(1, outliers.channels) - token_scale[:, None] * nearest
    return torch.where(outliers.valid, residual, 0.0)


def compensate(residual: Tensor, outliers: OutlierSet, weight_index: Tensor, codebook: Tensor) -> Tensor:
    """MACs: Σ r·C_W[j[:, channel]] over the outliers, one channel after the other.

    Args:
        residual: r, float32 [M, P].
        outliers: the channels of `residual`.
        weight_index: j, uint8 [N, K].
        codebook: C_W, float16 [2**n_W].

    Returns:
        float32 [M, N]: the sum in float64, rounded once.
    """
    by_channel = weight_index.T.contiguous()
    dequantized = codebook.double()
    total = torch.zeros(len(residual), len(weight_index), dtype=torch.float64)
    for position in range(residual.shape[1]):
        columns = dequantized[by_channel[outliers.channels[:, position]].long()]
        total += residual[:, position, None].double() * columns
    return total.float()
