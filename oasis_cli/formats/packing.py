"""Weight indices on disk and in the image: two to a byte, low nibble first (DESIGN: packed for up to 4 bits)."""

import torch
from torch import Tensor

MAX_BITS = 4


def packed_length(K: int) -> int:
    """Bytes that hold one output channel of K indices."""
    return (K + 1) // 2


def pack_indices(index: Tensor) -> Tensor:
    """Two indices to a byte, the lower channel in the low nibble; an odd K leaves the last high nibble 0.

    Args:
        index: uint8 [N, K], each below 16.

    Returns:
        uint8 [N, ceil(K/2)].

    Raises:
        ValueError: an index does not fit a nibble.
    """
    if index.numel() and int(index.max()) >= 1 << MAX_BITS:
        raise ValueError(f"index {int(index.max())} does not fit {MAX_BITS} bits")
    low, high = index[:, 0::2], index[:, 1::2]
    packed = low.clone()
    packed[:, : high.shape[1]] |= high << MAX_BITS
    return packed


def unpack_indices(packed: Tensor, K: int) -> Tensor:
    """Inverse of `pack_indices`.

    Args:
        packed: uint8 [N, ceil(K/2)].
        K: number of input channels.

    Returns:
        uint8 [N, K].

    Raises:
        ValueError: `packed` is not as wide as K needs.
    """
    if packed.shape[-1] != packed_length(K):
        raise ValueError(f"{packed.shape[-1]} bytes a channel do not hold K = {K} indices")
    index = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.uint8, device=packed.device)
    index[:, 0::2] = packed & 0xF
    index[:, 1::2] = packed >> MAX_BITS
    return index[:, :K]
