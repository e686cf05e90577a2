"""Weights of the methods that oasis is compared with: integers, nearest or by GPTQ, and block floating point."""

from typing import Final

import torch
from torch import Tensor

from oasis_cli.formats.baseline import AS_IT_IS, Rounding
from oasis_cli.numerics.uniform import MX_BLOCK, NV_BLOCK, in_groups, integer_limit, round_to_nvfp4
from oasis_cli.quantization.error_feedback import ErrorFeedback, damped
from oasis_cli.runtime.baseline import WIDE_BITS, round_channels

_CLIP_STEPS: Final = 100
_LOWEST_CLIP: Final = 0.2
_CLIP_NORM: Final = 2.4
"""Of the search for the clipping range in GPTQ's code, which QuaRot's takes over."""
_DAMPING: Final = 0.01
_HALF_BITS: Final = 16


def round_weight(weight: Tensor, rounding: Rounding, order: Tensor | None = None) -> Tensor:
    """Every weight to the nearest number of the format.

    Args:
        weight: W, float32 [N, K].
        rounding: how.
        order: as in `round_channels`.

    Returns:
        float32 [N, K].
    """
    if rounding.numbers == "nvfp4":  # one outer scale a tensor, as the format has it
        return round_to_nvfp4(weight, weight.abs().amax().view(1, 1))
    return round_channels(weight, rounding, order)


def search_clip(weight: Tensor, bits: int) -> Tensor:
    """The scale of every output channel that loses least, among shares of its largest magnitude.

    Args:
        weight: W, float32 [N, K].
        bits: of the integers.

    Returns:
        float32 [N, 1].
    """
    limit = integer_limit(bits)
    whole = weight.abs().amax(dim=1, keepdim=True) / limit
    whole = whole.where(whole > 0, 1.0)
    best, least = whole, torch.full_like(whole, torch.inf)
    for step in range(_CLIP_STEPS):
        scale = whole * (1 - (1 - _LOWEST_CLIP) * step / _CLIP_STEPS)
        rounded = (weight / scale).round().clamp(-limit - 1, limit) * scale
        error = (rounded - weight).abs().pow(_CLIP_NORM).sum(dim=1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def gptq(weight: Tensor, moments: Tensor, rounding: Rounding, order: Tensor | None = None) -> Tensor:
    """Integers by error feedback (Frantar et al. 2023), on scales that are fixed beforehand.

    Args:
        weight: W, float32 [N, K].
        moments: sum of x xᵀ of the layer's input, [K, K].
        rounding: integers; without groups their scales are searched for.
        order: channels in the order in which groups are formed, the wide ones last; None for no order.

    Returns:
        float32 [N, K].
    """
    N, K = weight.shape
    order = torch.arange(K) if order is None else order.long()
    narrow = K - rounding.wide_channels
    scale, limits = torch.empty(N, K), torch.full((K,), integer_limit(rounding.bits))
    first = weight[:, order[:narrow]]
    if rounding.group:
        blocks = in_groups(first, rounding.group)
        groups = rounding.clip * blocks.abs().amax(dim=-1, keepdim=True) / integer_limit(rounding.bits)
        scale[:, order[:narrow]] = groups.expand_as(blocks).flatten(-2)[:, :narrow]
    else:
        scale[:, order[:narrow]] = search_clip(first, rounding.bits).expand_as(first)
    if rounding.wide_channels:
        limits[order[narrow:]] = integer_limit(WIDE_BITS)
        scale[:, order[narrow:]] = weight[:, order[narrow:]].abs().amax(dim=1, keepdim=True) / integer_limit(WIDE_BITS)
    scale = scale.where(scale > 0, 1.0)
    found = torch.empty_like(weight)

    def nearest(k: int, channel: Tensor) -> Tensor:
        limit = int(limits[k])
        found[:, k] = (channel / scale[:, k]).round().clamp(-limit - 1, limit) * scale[:, k]
        return found[:, k]

    ErrorFeedback(damped(moments, _DAMPING)).run(weight, nearest)
    return found


def bits_a_weight(K: int, rounding: Rounding) -> float:
    """What a weight is stored in, its share of scales (16 bits each, or the format's own) included."""
    if rounding.numbers == "none":
        return float(AS_IT_IS)
    if rounding.numbers == "mxfp4":
        return 4 + 8 / MX_BLOCK
    if rounding.numbers == "nvfp4":
        return 4 + 8 / NV_BLOCK
    wide = rounding.wide_channels
    scales = -(-(K - wide) // (rounding.group or K)) + (wide > 0)
    return ((K - wide) * rounding.bits + wide * WIDE_BITS + scales * _HALF_BITS) / K
