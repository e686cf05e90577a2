"""Token scales s_t (§III-A): one positive number a token, found in one pass before clustering."""

from typing import Literal, get_args

import torch
from torch import Tensor

from oasis_cli.numerics.outliers import find_outliers

ScaleKind = Literal["absmax", "rms", "mean_abs", "inlier_absmax"]
SCALE_KINDS: tuple[ScaleKind, ...] = get_args(ScaleKind)


def token_scale(x: Tensor, kind: ScaleKind = "absmax", outliers_a_side: int = 0) -> Tensor:
    """Scale of every token; sums run in float64 and are rounded once.

    Args:
        x: activations, float [M, K].
        kind: `absmax` largest magnitude; `rms` root of the mean square; `mean_abs` mean magnitude;
            `inlier_absmax` largest magnitude once the outliers are gone, which needs the outlier search first.
        outliers_a_side: how many values a side count as outliers, for `inlier_absmax` only.

    Returns:
        float32 [M]; 0 for a token of zeros, NaN for a token that holds a value that is not finite.

    Raises:
        ValueError: unknown kind.
    """
    x = x.float()
    M, K = x.shape
    if K == 0:
        return torch.zeros(M, dtype=torch.float32, device=x.device)
    if kind == "absmax":
        least, greatest = x.aminmax(dim=1)
        scale = torch.maximum(greatest, -least).abs()  # abs: a token of -0.0 has scale 0.0
    elif kind == "rms":
        scale = x.double().square().mean(dim=1).sqrt().float()
    elif kind == "mean_abs":
        scale = x.double().abs().mean(dim=1).float()
    elif kind == "inlier_absmax":
        scale = x.abs().masked_fill(find_outliers(x, outliers_a_side), 0.0).amax(dim=1)
        scale = scale.where(x.isfinite().all(dim=1), torch.nan)
    else:
        raise ValueError(f"unknown scale kind {kind!r}; one of {SCALE_KINDS}")
    # a value that is not finite leaves its mark on any maximum or sum of magnitudes
    return scale.where(scale.isfinite(), torch.nan)
