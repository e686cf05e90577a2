"""Decoder blocks one after the other, each seeing what the blocks before it give once they are quantized.

One block is held in float32, with the second moments of its sites; of the tokens, what enters the block.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oasis_cli.models.sites import decoder_blocks
from oasis_cli.numerics.gemm import ActivationFormat, dequantized

_Hook = Callable[[str, Tensor], Tensor]
"""Given a layer and its input, gives what the layer gets instead."""


class BlockStream:
    """The calibration tokens, standing before one block.

    Args:
        model: the original; it is left as it is.
        tokens: calibration sequences, int64 [samples, seqlen].
        site_of: each quantized layer's site.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, site_of: Mapping[str, str]) -> None:
        self._prefix, self._blocks = decoder_blocks(model)
        self._site_of = site_of
        self._hidden, self._calls = _enter(model, self._blocks, tokens.to(model.device))

    def inputs(self, number: int, layers: Sequence[str], samples: int) -> dict[str, list[Tensor]]:
        """What reaches every site of block `number` in the first sequences, the block itself being the original.

        Args:
            number: the block before which the stream stands.
            layers: its quantized layers.
            samples: how many sequences.

        Returns:
            By site, float32 [T, K] of each sequence.
        """
        block = self._copy(number)
        found: dict[str, list[Tensor]] = {self._site_of[layer]: [] for layer in layers}

        def keep(layer: str, x: Tensor) -> Tensor:
            found[self._site_of[layer]].append(x.reshape(-1, x.shape[-1]))
            return x

        for hidden in self._hidden[:samples]:
            self._run(number, block, hidden, self._one_a_site(layers), keep)
        return found

    def moments(
        self, number: int, layers: Sequence[str], formats: Mapping[str, ActivationFormat | None], samples: int
    ) -> dict[str, Tensor]:
        """H = sum of x̂ x̂ᵀ of every site of block `number`, float64 [K, K], the weights being the original ones.

        Args:
            number: the block before which the stream stands.
            layers: its quantized layers.
            formats: of its sites, by name; None leaves a site's activations as they are.
            samples: how many sequences.
        """
        block = self._copy(number)
        found: dict[str, Tensor] = {}

        def add(site: str, x: Tensor) -> None:
            flat = x.reshape(-1, x.shape[-1])
            product = (flat.T @ flat).double()
            found[site] = found[site] + product if site in found else product

        for hidden in self._hidden[:samples]:
            self._run(number, block, hidden, layers, self._quantize(formats, add))
        return found

    def advance(
        self, number: int, weights: Mapping[str, Tensor], formats: Mapping[str, ActivationFormat | None]
    ) -> None:
        """Pass block `number` with these weights, float32 [N, K] by layer, and activations so quantized."""
        block = self._copy(number)
        for name, weight in weights.items():
            original: nn.Parameter = block.get_parameter(f"{self._inside(number, name)}.weight")
            original.data = weight.to(original.device)
        quantize = self._quantize(formats, lambda site, x: None)
        self._hidden = [self._run(number, block, hidden, list(weights), quantize) for hidden in self._hidden]

    def _copy(self, number: int) -> nn.Module:
        return copy.deepcopy(self._blocks[number]).float()

    def _inside(self, number: int, layer: str) -> str:
        return layer.removeprefix(f"{self._prefix}.{number}.")

    def _one_a_site(self, layers: Sequence[str]) -> Iterable[str]:
        return {self._site_of[layer]: layer for layer in reversed(layers)}.values()

    @torch.no_grad()
    def _run(self, number: int, block: nn.Module, hidden: Tensor, layers: Iterable[str], hook: _Hook) -> Tensor:
        """The block's output, with the inputs of `layers` as `hook` makes them."""
        with ExitStack() as hooks:
            for name in layers:

                def change(_: nn.Module, args: tuple[Any, ...], name: str = name) -> tuple[Any, ...]:
                    return (hook(name, args[0]), *args[1:])

                layer = block.get_submodule(self._inside(number, name))
                hooks.callback(layer.register_forward_pre_hook(change).remove)
            output: Tensor | tuple[Tensor, ...] = block(hidden, **self._calls[number])
        return output[0] if isinstance(output, tuple) else output

    def _quantize(self, formats: Mapping[str, ActivationFormat | None], note: Callable[[str, Tensor], None]) -> _Hook:
        """Inputs are quantized, once a site, and noted."""
        last: dict[str, tuple[Tensor, Tensor]] = {}

        def hook(layer: str, x: Tensor) -> Tensor:
            site = self._site_of[layer]
            if site not in last or last[site][0] is not x:
                fmt = formats[site]
                last[site] = x, x.float() if fmt is None else dequantized(x, fmt)
                note(site, last[site][1])
            return last[site][1]

        return hook


@torch.no_grad()
def _enter(model: PreTrainedModel, blocks: nn.ModuleList, tokens: Tensor) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """What enters the first block, float32 [1, T, width] a sequence, and what else each block is called with.

    The blocks themselves are passed by, so that this costs next to nothing. Sequences are of one length and nothing of
    them is masked, so that the other arguments are those of the first for all.
    """
    hidden: list[Tensor] = []
    calls: list[dict[str, Any]] = []
    originals = [block.forward for block in blocks]

    def passing(*args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        if len(calls) < len(blocks):
            calls.append({key: _float(value) for key, value in kwargs.items() if key != "hidden_states"})
        return x

    try:
        for block in blocks:
            block.forward = passing
        for sequence in tokens:
            with ExitStack() as hooks:
                note = blocks[0].register_forward_hook(lambda _m, _i, out: hidden.append(out.float()))
                hooks.callback(note.remove)
                model(input_ids=sequence[None], use_cache=False, logits_to_keep=1)
    finally:
        for block, original in zip(blocks, originals, strict=True):
            block.forward = original
    return hidden, calls


def _float(value: Any) -> Any:
    """Floating-point tensors widened, inside of tuples too."""
    if isinstance(value, tuple):
        return tuple(_float(member) for member in value)
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
