"""The activations of every site and the loss's gradients with respect to them, one decoder block at a time.

The forward pass keeps only what enters each block; the backward pass walks the blocks from last to first, runs each
again with its graph, and carries the gradient on. The numbers are those of one backward pass through the whole
model (§V-A: Fisher information of the activations), in the memory of one block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oasis_cli.models.sites import Site, decoder_blocks

SiteVisitor = Callable[[Site, Tensor, Tensor | None], None]
"""Called with a site, its activations [T, K] and the loss's gradient with respect to them [T, K], if there is one."""

# Positions whose logits exist at a time: a vocabulary of 50,000 then costs 100 MB a copy, not 400.
_HEAD_CHUNK = 512


@dataclass(frozen=True)
class _BlockCall:
    """How the model called a decoder block: its input and everything else it was given."""

    hidden: Tensor
    kwargs: dict[str, Any]


def visit_sites(
    model: nn.Module, sites: Sequence[Site], tokens: Tensor, visit: SiteVisitor, gradients: bool = True
) -> float:
    """Run one sequence forward and backward, showing every site's activations and gradients to `visit`.

    The loss is the summed next-token cross-entropy of the sequence.

    Args:
        model: a causal language model whose parameters take no gradient.
        sites: the sites to visit, of `find_sites(model)`.
        tokens: int64 [1, T], T at least 2.
        visit: called once a site, from the last block to the first.
        gradients: False leaves the backward pass out, and shows activations alone, from the first block to the last.

    Returns:
        The loss per predicted token.
    """
    _, blocks = decoder_blocks(model)
    if not gradients:
        with _watched(model, sites, lambda site, x: visit(site, x.reshape(-1, site.K), None)):
            _, last_hidden = _forward(model, blocks, tokens)
        return _head_loss(model, blocks, tokens, last_hidden)
    calls, last_hidden = _forward(model, blocks, tokens)
    loss, gradient = _head_gradient(model, blocks, tokens, last_hidden)
    for index in range(len(blocks) - 1, -1, -1):
        block_sites = [site for site in sites if site.block == index]
        gradient = _backward_block(model, blocks[index], calls[index], block_sites, gradient, visit)
    return loss


def _first(output: Any) -> Tensor:
    """The hidden states that a block gives, alone or first of a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


@torch.no_grad()
def _forward(model: nn.Module, blocks: nn.ModuleList, tokens: Tensor) -> tuple[list[_BlockCall], Tensor]:
    """What entered every block, and what left the last one."""
    calls: list[_BlockCall] = []
    left: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        calls.append(_BlockCall(hidden, {k: v for k, v in kwargs.items() if k != "hidden_states"}))

    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)
        hooks.callback(blocks[-1].register_forward_hook(lambda _m, _i, out: left.append(_first(out))).remove)
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    return calls, left[0]


@contextmanager
def _blocks_skipped(blocks: nn.ModuleList, hidden: Tensor) -> Iterator[None]:
    """Within the context the decoder blocks only pass on `hidden`, so that the model is its head alone."""
    originals = [block.forward for block in blocks]
    try:
        for block in blocks:
            block.forward = lambda *_args, **_kwargs: hidden
        yield
    finally:
        for block, original in zip(blocks, originals, strict=True):
            block.forward = original


def _head_gradient(model: nn.Module, blocks: nn.ModuleList, tokens: Tensor, hidden: Tensor) -> tuple[float, Tensor]:
    """Mean loss, and the gradient of the summed loss with respect to what left the last block."""
    leaf = hidden.detach().requires_grad_()
    gradient = torch.zeros_like(leaf)
    T, total = tokens.shape[1], 0.0
    with _blocks_skipped(blocks, leaf), torch.enable_grad():
        for start in range(0, T - 1, _HEAD_CHUNK):
            positions = torch.arange(start, min(start + _HEAD_CHUNK, T - 1), device=tokens.device)
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=positions).logits[0]
            loss = nn.functional.cross_entropy(logits.float(), tokens[0, positions + 1], reduction="sum")
            gradient += torch.autograd.grad(loss, leaf)[0]
            total += float(loss.detach())
    return total / (T - 1), gradient


@torch.no_grad()
def _head_loss(model: nn.Module, blocks: nn.ModuleList, tokens: Tensor, hidden: Tensor) -> float:
    """Mean loss of what left the last block."""
    T, total = tokens.shape[1], 0.0
    with _blocks_skipped(blocks, hidden):
        for start in range(0, T - 1, _HEAD_CHUNK):
            positions = torch.arange(start, min(start + _HEAD_CHUNK, T - 1), device=tokens.device)
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=positions).logits[0]
            total += float(nn.functional.cross_entropy(logits.float(), tokens[0, positions + 1], reduction="sum"))
    return total / (T - 1)


@contextmanager
def _watched(model: nn.Module, sites: Sequence[Site], note: Callable[[Site, Tensor], None]) -> Iterator[None]:
    """Within the context, `note` hears what each site receives."""
    with ExitStack() as hooks:
        for site in sites:

            def hear(_: nn.Module, args: tuple[Any, ...], site: Site = site) -> None:
                note(site, args[0])

            hooks.callback(model.get_submodule(site.layers[0]).register_forward_pre_hook(hear).remove)
        yield


def _backward_block(
    model: nn.Module, block: nn.Module, call: _BlockCall, sites: Sequence[Site], gradient: Tensor, visit: SiteVisitor
) -> Tensor:
    """Run one block again with its graph, show its sites, and return the gradient with respect to its input."""
    inputs: dict[str, Tensor] = {}
    with _watched(model, sites, lambda site, x: inputs.update({site.name: x})), torch.enable_grad():
        leaf = call.hidden.detach().requires_grad_()
        output = _first(block(leaf, **call.kwargs))
        wanted = [leaf, *(inputs[site.name] for site in sites)]
        gradients = torch.autograd.grad(output, wanted, grad_outputs=gradient, allow_unused=True)
    for site, found in zip(sites, gradients[1:], strict=True):
        x = inputs[site.name].detach().reshape(-1, site.K)
        visit(site, x, torch.zeros_like(x) if found is None else found.reshape(-1, site.K))
    carried: Tensor = gradients[0]
    return carried
