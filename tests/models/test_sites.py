"""Are the sites those that the architecture's diagram shows?"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from oasis_cli.errors import InputError
from oasis_cli.models.sites import Site, decoder_blocks, find_sites

Make = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_sites_of_a_decoder(tiny_model: Make, family: str) -> None:
    """q/k/v read the first norm's output, o the attention's, gate/up the second norm's, down the gated product."""
    expected = []
    for block in range(2):
        attention, mlp = f"model.layers.{block}.self_attn", f"model.layers.{block}.mlp"
        layers = tuple(f"{attention}.{name}_proj" for name in "qkv")
        expected += [
            Site(f"{attention}.q_proj+k_proj+v_proj", block, layers, 16),
            Site(f"{attention}.o_proj", block, (f"{attention}.o_proj",), 16),
            Site(f"{mlp}.gate_proj+up_proj", block, (f"{mlp}.gate_proj", f"{mlp}.up_proj"), 16),
            Site(f"{mlp}.down_proj", block, (f"{mlp}.down_proj",), 24),
        ]
    assert find_sites(tiny_model(family)) == tuple(expected)


def test_one_block_and_heads_wider_than_the_model(tiny_model: Make) -> None:
    sites = find_sites(tiny_model(num_hidden_layers=1, head_dim=8))
    assert [site.K for site in sites] == [16, 32, 16, 24]


def test_a_model_without_weights_will_do(tiny_model: Make) -> None:
    with torch.device("meta"):
        assert len(find_sites(tiny_model())) == 8


def test_nothing_is_left_behind(tiny_model: Make) -> None:
    model = tiny_model()
    state = torch.get_rng_state()
    find_sites(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_of_different_modules_share_by_tensor_not_by_name(tiny_model: Make) -> None:
    """A parallel block: one projection of the MLP reads what the attention reads."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleDict({"query": nn.Linear(16, 16), "out": nn.Linear(16, 16)})
            self.mlp = nn.Linear(16, 16)
            self.copied = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
            query = self.attention["query"](x) + self.mlp(x) + self.copied(x.clone())
            out: torch.Tensor = self.attention["out"](query)
            return out

    model = tiny_model(num_hidden_layers=1)
    model.model.layers[0] = Parallel()
    assert [site.name for site in find_sites(model)] == [
        "model.layers.0.attention.query+mlp",
        "model.layers.0.copied",
        "model.layers.0.attention.out",
    ]


@pytest.mark.parametrize(("runs", "times"), [(0, "0 times"), (2, "2 times")])
def test_a_layer_without_one_site_is_refused(tiny_model: Make, runs: int, times: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
            for _ in range(runs):
                x = self.odd(x)
            return x

    model = tiny_model(num_hidden_layers=1)
    model.model.layers[0] = Odd()
    with pytest.raises(InputError, match=rf"model\.layers\.0\.odd: ran {times} in a forward pass"):
        find_sites(model)


def test_a_model_without_blocks_is_refused(tiny_model: Make) -> None:
    model = tiny_model()
    model.model.layers = nn.ModuleList()
    with pytest.raises(InputError, match="llama model: holds no list of 2 decoder blocks"):
        decoder_blocks(model)
