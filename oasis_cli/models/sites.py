"""Sites: the activation tensors that feed a model's linear layers, found by watching it run (DESIGN: words)."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oasis_cli.errors import InputError

_TRACE_TOKENS: Final = 4


@dataclass(frozen=True)
class Site:
    """An activation tensor that is scaled, clustered and searched for outliers once for all the layers it feeds.

    Attributes:
        name: the layers' common parent and their own names, such as `model.layers.0.self_attn.q_proj+k_proj+v_proj`.
        block: index of the decoder block.
        layers: full names of the linear layers it feeds, in the order in which they run.
        K: its width.
    """

    name: str
    block: int
    layers: tuple[str, ...]
    K: int


def decoder_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The list of decoder blocks and its name.

    Raises:
        InputError: the model has no list of as many modules as its configuration counts layers.
    """
    count = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise InputError(f"{model.config.model_type} model: holds no list of {count} decoder blocks; use another model")


def find_sites(model: PreTrainedModel) -> tuple[Site, ...]:
    """Every site of the decoder blocks, in the order in which the model computes them.

    The model runs once on a few tokens (on the meta device too); layers of a block that receive the very same tensor
    share a site. Layers outside of the blocks, such as the output head, are left alone.

    Raises:
        InputError: a linear layer of a block ran not at all or more than once, so that its site is not one tensor.
    """
    prefix, blocks = decoder_blocks(model)
    block_of, layers = {}, {}
    for index, block in enumerate(blocks):
        for name, module in block.named_modules(prefix=f"{prefix}.{index}"):
            if isinstance(module, nn.Linear):
                block_of[name], layers[name] = index, module
    inputs = _trace_inputs(model, layers)
    groups: dict[tuple[int, int], list[str]] = {}
    for name, x in inputs.items():  # every tensor is alive, so an id stands for one of them
        groups.setdefault((block_of[name], id(x)), []).append(name)
    return tuple(
        Site(_join_names(names), block, tuple(names), layers[names[0]].in_features)
        for (block, _), names in groups.items()
    )


def _trace_inputs(model: PreTrainedModel, layers: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """Run the model on a few tokens and keep what each layer receives, in the order in which they run."""
    inputs: dict[str, Tensor] = {}
    runs: Counter[str] = Counter()

    def watch(name: str, layer: nn.Linear) -> Any:
        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs[name] = args[0]
            runs[name] += 1

        return layer.register_forward_pre_hook(keep)

    with ExitStack() as hooks, torch.no_grad():
        for name, layer in layers.items():
            hooks.callback(watch(name, layer).remove)
        tokens = torch.zeros(1, _TRACE_TOKENS, dtype=torch.long, device=model.device)
        # a finished mask spares transformers the look at its values, which a model on the meta device has not
        mask = torch.ones(1, 1, _TRACE_TOKENS, _TRACE_TOKENS, dtype=torch.bool, device=model.device)
        model(input_ids=tokens, attention_mask=mask, use_cache=False)
    for name in layers:
        if runs[name] != 1:
            raise InputError(
                f"{name}: ran {runs[name]} times in a forward pass, so it has no single site; use another model"
            )
    return inputs


def _join_names(layers: list[str]) -> str:
    if len(layers) == 1:
        return layers[0]
    parts = [layer.split(".") for layer in layers]
    # the common parent; every layer keeps its last name at least
    shared = len(list(takewhile(lambda level: len(set(level)) == 1, zip(*(part[:-1] for part in parts), strict=False))))
    return ".".join(parts[0][:shared]) + "." + "+".join(".".join(part[shared:]) for part in parts)
