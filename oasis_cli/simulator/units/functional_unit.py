"""The Functional Unit: everything between the GEMMs, in float32.

Each function takes the very steps, in the very order, of the transformers models of this family (`LlamaRMSNorm`,
`apply_rotary_pos_emb`, `sdpa_attention_forward`), so that equal inputs give equal bits.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension.

    Args:
        x: float32 [1, T, N].
        weight: float32 [N].
        epsilon: added to the mean square.

    Returns:
        float32 [1, T, N].
    """
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + epsilon))


def rotate(x: Tensor, inverse_frequencies: Tensor, scaling: float, head_dim: int) -> Tensor:
    """Rotary positions 0, 1, … on every head.

    Args:
        x: float32 [1, T, heads * head_dim].
        inverse_frequencies: float32 [head_dim / 2].
        scaling: factor on cosine and sine.
        head_dim: channels of a head.

    Returns:
        float32 [1, T, heads * head_dim].
    """
    positions = torch.arange(x.shape[1])[None, :, None].float()
    angles = positions * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cosine, sine = (angles.cos() * scaling).unsqueeze(1), (angles.sin() * scaling).unsqueeze(1)
    heads = split_heads(x, head_dim)
    first, second = heads[..., : head_dim // 2], heads[..., head_dim // 2 :]
    turned = torch.cat((-second, first), dim=-1)
    return merge_heads((heads * cosine) + (turned * sine))


def attend(query: Tensor, key: Tensor, value: Tensor, head_dim: int, scale: float) -> Tensor:
    """Causal attention of a whole window.

    Args:
        query: float32 [1, T, heads * head_dim].
        key: float32 [1, T, kv_heads * head_dim].
        value: as `key`.
        head_dim: channels of a head.
        scale: factor on the scores.

    Returns:
        float32 [1, T, heads * head_dim].
    """
    attended = F.scaled_dot_product_attention(
        split_heads(query, head_dim),
        split_heads(key, head_dim),
        split_heads(value, head_dim),
        scale=scale,
        is_causal=query.shape[1] > 1,
        enable_gqa=query.shape[-1] > key.shape[-1],
    )
    return merge_heads(attended)


def gate(gate_values: Tensor, up: Tensor | None) -> Tensor:
    """SiLU of the gate, times up where there is one; all float32 [1, T, N]."""
    activated = F.silu(gate_values)
    return activated if up is None else activated * up


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[1, T, heads * head_dim] to [1, heads, T, head_dim], a view."""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """The inverse of `split_heads`, copied: [1, heads, T, head_dim] to [1, T, heads * head_dim]."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1).contiguous()
