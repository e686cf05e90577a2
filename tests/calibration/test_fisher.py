"""Gradients block by block against one backward pass through the whole model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from oasis_cli.calibration import fisher
from oasis_cli.calibration.fisher import visit_sites
from oasis_cli.models.sites import find_sites

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)) if family == "llama" else Qwen2ForCausalLM(Qwen2Config(**SIZES))
    return model.eval().requires_grad_(False)


def whole_model(model: PreTrainedModel, tokens: torch.Tensor, sites: tuple) -> tuple[float, dict]:
    """Activations and gradients of every site in one graph."""
    inputs: dict[str, torch.Tensor] = {}
    for site in sites:
        model.get_submodule(site.layers[0]).register_forward_pre_hook(
            lambda _, args, name=site.name: inputs.__setitem__(name, args[0])
        )
    model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: out.requires_grad_())
    logits = model(input_ids=tokens, use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum")
    gradients = torch.autograd.grad(loss, [inputs[site.name] for site in sites])
    return loss.item() / (tokens.shape[1] - 1), {
        site.name: (inputs[site.name].detach()[0], gradient[0]) for site, gradient in zip(sites, gradients, strict=True)
    }


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("chunk", [512, 5])
def test_equals_one_backward_pass(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fisher, "_HEAD_CHUNK", chunk)
    model, tokens = make(family), torch.randint(0, 40, (1, 33), generator=torch.Generator().manual_seed(1))
    sites = find_sites(model)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    loss = visit_sites(model, sites, tokens, lambda site, x, g: found.__setitem__(site.name, (x, g)))
    expected_loss, expected = whole_model(model, tokens, sites)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert list(found) == [name for block in (2, 1, 0) for name in expected if f".{block}." in name]
    for name, (x, gradient) in expected.items():
        torch.testing.assert_close(found[name][0], x)
        torch.testing.assert_close(found[name][1], gradient, rtol=1e-4, atol=1e-7)


def test_without_gradients_activations_and_loss_are_the_same() -> None:
    model, tokens = make("llama"), torch.randint(0, 40, (1, 33), generator=torch.Generator().manual_seed(1))
    sites = find_sites(model)
    both: list[dict[str, torch.Tensor]] = [{}, {}]
    losses = [
        visit_sites(model, sites, tokens, lambda site, x, g, kept=kept: kept.__setitem__(site.name, x), gradients)
        for kept, gradients in zip(both, (True, False), strict=True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert list(both[1]) == [site.name for site in sites]
    assert set(both[0]) == set(both[1])
    for name, x in both[0].items():
        torch.testing.assert_close(both[1][name], x)


def test_gradient_by_finite_difference() -> None:
    """One activation nudged by hand moves the loss by its gradient."""
    model, tokens = make("llama").double(), torch.randint(0, 40, (1, 12), generator=torch.Generator().manual_seed(2))
    sites = find_sites(model)
    found: dict[str, torch.Tensor] = {}
    visit_sites(model, sites, tokens, lambda site, _, g: found.__setitem__(site.name, g))
    site, step = sites[1], 1e-2

    def loss(nudge: float) -> float:
        def hook(_: object, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            x = args[0].clone()
            x[0, 4, 7] += nudge
            return (x,)

        handle = model.get_submodule(site.layers[0]).register_forward_pre_hook(hook)
        logits = model(input_ids=tokens, use_cache=False).logits[0]
        handle.remove()
        return torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum").item()

    slope = (loss(step) - loss(-step)) / (2 * step)
    assert found[site.name][4, 7].item() == pytest.approx(slope, rel=5e-3)  # norms run in float32


def test_the_model_is_left_as_it_was() -> None:
    model, tokens = make("llama"), torch.arange(12)[None]
    before = model(input_ids=tokens).logits
    visit_sites(model, find_sites(model), tokens, lambda *_: None)
    assert torch.equal(model(input_ids=tokens).logits, before)
    assert not any(module._forward_pre_hooks for module in model.modules())
