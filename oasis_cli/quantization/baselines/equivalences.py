"""Changes to a model's weights that leave what it computes as it is, so that less is lost when it is rounded."""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oasis_cli.errors import InputError
from oasis_cli.formats.baseline import BaselineLayer, Rounding
from oasis_cli.models.sites import decoder_blocks
from oasis_cli.numerics.hadamard import hadamard_factors, rotate
from oasis_cli.runtime.baseline import replace_linear

_AFTER_NORM = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
"""What reads each norm of a block, in the families that the tool knows."""
_INTO_RESIDUAL = ("o_proj", "down_proj")
_SMALLEST = 1e-5


def _readers(block: nn.Module, norm: str) -> list[nn.Linear]:
    names = {name.rpartition(".")[2]: module for name, module in block.named_modules()}
    return [names[name] for name in _AFTER_NORM[norm]]


@torch.no_grad()
def smooth(model: PreTrainedModel, largest: dict[str, Tensor], alpha: float) -> None:
    """SmoothQuant (Xiao et al. 2023): part of what activations vary by between channels is moved into the weights.

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha); a norm's weight is divided by s, and the columns of what reads it
    multiplied. As in the authors' code only inputs of norms are smoothed.

    Args:
        model: changed in place.
        largest: each site's largest magnitude of every channel, float [K], by one of its layers' names.
        alpha: 0 leaves activations as they are, 1 weights.
    """
    _, blocks = decoder_blocks(model)
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        for norm in _AFTER_NORM:
            layers = _readers(block, norm)
            seen = next((largest[names[layer]] for layer in layers if names[layer] in largest), None)
            if seen is None:  # nothing that reads this norm is quantized
                continue
            x = seen.clamp(min=_SMALLEST)
            w = torch.stack([layer.weight.abs().amax(dim=0) for layer in layers]).amax(dim=0).clamp(min=_SMALLEST)
            scale = (x.to(w).pow(alpha) / w.pow(1 - alpha)).clamp(min=_SMALLEST)
            block.get_parameter(f"{norm}.weight").div_(scale)
            for layer in layers:
                layer.weight.mul_(scale)


@torch.no_grad()
def rotate_model(model: PreTrainedModel, seed: int, quantized: Collection[str]) -> tuple[str, ...]:
    """QuaRot (Ashkboos et al. 2024): the residual stream and the inputs of o_proj and down_proj in rotated bases.

    The stream's rotation is a randomized Hadamard matrix, folded into embeddings, weights and output head (untied
    first); norms give up their weights to what reads them. The other two are Hadamard matrices, applied when the model
    runs: that of o_proj is the authors' over heads and within heads in one. Their rotation of queries and keys serves
    a quantized cache alone and is left out.

    Args:
        model: changed in place, in float32.
        seed: of the signs.
        quantized: layers that will be; the inputs of others need no rotation when the model runs.

    Returns:
        The layers whose inputs are rotated when the model runs.

    Raises:
        InputError: no Hadamard matrix of a layer's width is known.
    """
    _untie(model)
    prefix, blocks = decoder_blocks(model)
    width = model.config.hidden_size
    online = []
    for index, block in enumerate(blocks):
        for name, module in block.named_modules(prefix=f"{prefix}.{index}"):
            if isinstance(module, nn.Linear) and name.endswith(_INTO_RESIDUAL) and name in quantized:
                online.append(name)
    for name, size in [("the residual stream", width), *((n, model.get_submodule(n).in_features) for n in online)]:
        if hadamard_factors(size) is None:
            raise InputError(
                f"{model.config.model_type} model: quarot needs a Hadamard matrix of order {size} for {name}, and none "
                "is known here; quantize with another method"
            )
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(seed)).float().mul_(2).sub_(1)
    basis = rotate(signs.diag())  # Q = diag(signs) H / sqrt(width)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.weight.copy_(embedding.weight @ basis)
    for block in blocks:
        for norm in _AFTER_NORM:
            gain = block.get_parameter(f"{norm}.weight")
            for layer in _readers(block, norm):
                layer.weight.copy_((layer.weight * gain) @ basis)
            gain.fill_(1)
        for layer in (m for n, m in block.named_modules() if n.endswith(_INTO_RESIDUAL)):
            layer.weight.copy_(basis.T @ layer.weight)
            if layer.bias is not None:
                layer.bias.copy_(basis.T @ layer.bias)
    last = model.base_model.norm.weight
    head.weight.copy_((head.weight * last) @ basis)
    last.fill_(1)
    for name in online:
        original = model.get_submodule(name)
        layer = replace_linear(model, name, BaselineLayer(True, Rounding(), 16.0))
        layer.weight.copy_(rotate(original.weight))
        if original.bias is not None:
            layer.bias.copy_(original.bias)
    return tuple(online)


def _untie(model: PreTrainedModel) -> None:
    """Give the output head weights of its own."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
