"""Uniform and block floating-point numbers: what the methods that oasis is compared with round to."""

from typing import Final

import torch
from torch import Tensor

_FP4_BOUNDARIES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_LARGEST: Final = 6.0
_FP4_EXPONENT: Final = 2
"""Of the largest FP4 power of two, 4."""
_E8M0_LOWEST, _E8M0_HIGHEST = -127, 127
_E4M3_LARGEST: Final = 448.0
MX_BLOCK: Final = 32
NV_BLOCK: Final = 16


def integer_limit(bits: int) -> int:
    """Largest integer of a symmetric grid; the smallest is one further down."""
    return (1 << bits - 1) - 1


def in_groups(x: Tensor, group: int) -> Tensor:
    """[..., K] as [..., ceil(K / group), group], the last group filled up with zeros; 0 takes K for the group."""
    group = group or x.shape[-1]
    missing = -x.shape[-1] % group
    groups: Tensor = torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, group))
    return groups


def round_to_integers(x: Tensor, bits: int, group: int = 0, clip: float = 1.0) -> Tensor:
    """Symmetric integers: round(x / s) within [-2^(bits-1), 2^(bits-1) - 1] times s, ties to even.

    Args:
        x: float [..., K].
        bits: 2 or more.
        group: values that share a scale s = clip * absmax / (2^(bits-1) - 1), along K; 0 for all K.
        clip: share of the largest magnitude that the grid covers.

    Returns:
        [..., K] in the dtype of x.
    """
    blocks = in_groups(x, group)
    limit = integer_limit(bits)
    scale = clip * blocks.abs().amax(dim=-1, keepdim=True) / limit
    scale = scale.where(scale > 0, 1.0)
    rounded = (blocks / scale).round().clamp(-limit - 1, limit) * scale
    return rounded.flatten(-2)[..., : x.shape[-1]]


def _round_to_fp4(x: Tensor) -> Tensor:
    """Nearest FP4 (E2M1) value, ties to the even mantissa, beyond 6 saturated."""
    magnitude = x.abs()
    boundaries = torch.tensor(_FP4_BOUNDARIES, device=x.device, dtype=x.dtype)
    # a tie goes down where the lower value's mantissa is even, that is at every other boundary
    down, up = torch.bucketize(magnitude, boundaries), torch.bucketize(magnitude, boundaries, right=True)
    index = torch.where(down % 2 == 0, down, up)
    return torch.tensor(_FP4_VALUES, device=x.device, dtype=x.dtype)[index].copysign(x)


def round_to_mxfp4(x: Tensor) -> Tensor:
    """MXFP4 of the OCP Microscaling specification 1.0: blocks of 32 FP4 values that share a power of two.

    The exponent is floor(log2(absmax)) - 2, as the specification's section 6.3 has it.

    Args:
        x: float [..., K].

    Returns:
        [..., K] in the dtype of x.
    """
    blocks = in_groups(x.float(), MX_BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    # frexp gives a mantissa in [0.5, 1): one more than floor(log2)
    exponent = (torch.frexp(largest).exponent - 1 - _FP4_EXPONENT).clamp(_E8M0_LOWEST, _E8M0_HIGHEST)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    rounded = _round_to_fp4(blocks / scale) * scale
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def round_to_nvfp4(x: Tensor, largest: Tensor | None = None) -> Tensor:
    """NVFP4: blocks of 16 FP4 values with an FP8 (E4M3) scale each, and one FP32 scale for all.

    Args:
        x: float [..., K].
        largest: the magnitude that the FP32 scale is made for, broadcastable to x; None takes each row's own, which is
            finer than the one scale a tensor of the format, and independent of the batch.

    Returns:
        [..., K] in the dtype of x.
    """
    wide = x.float()
    if largest is None:
        largest = wide.abs().amax(dim=-1, keepdim=True)
    outer = (largest.float() / (_FP4_LARGEST * _E4M3_LARGEST))[..., None]
    outer = outer.where(outer > 0, 1.0)
    blocks = in_groups(wide, NV_BLOCK)
    inner = blocks.abs().amax(dim=-1, keepdim=True) / _FP4_LARGEST / outer
    scale = inner.clamp(max=_E4M3_LARGEST).to(torch.float8_e4m3fn).float() * outer
    rounded = torch.where(scale > 0, _round_to_fp4(blocks / scale.where(scale > 0, 1.0)) * scale, 0.0)
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
