"""Does the module compute what its numbers say, whatever is done to it?"""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oasis_cli.formats.packing import unpack_indices
from oasis_cli.formats.quantized import declare_layer
from oasis_cli.numerics.gemm import ActivationFormat, QuantizedActivations, quantize_activations
from oasis_cli.runtime import linear as module
from oasis_cli.runtime.linear import OasisLinear

Make = Callable[..., OasisLinear]


def expected_output(layer: OasisLinear, x: Tensor, k: int) -> np.ndarray:
    """DESIGN's fifth number in float64 NumPy: token by token, the outliers by sorting, no LUT."""
    tensors = {name: tensor.double().numpy() for name, tensor in layer.state_dict().items() if name != "weight"}
    weight = tensors["weight_codebook"][unpack_indices(layer.weight, layer.in_features).numpy()]
    levels = tensors["act_codebook"]
    rows = []
    for token in x.double().numpy():
        scale = np.abs(token).max()
        index = ((levels[1:] + levels[:-1]) / 2 * scale <= token[:, None]).sum(axis=1)
        if "act_thresholds" in tensors:
            lower, upper = tensors["act_thresholds"]
            outliers = np.flatnonzero((token < lower) | (token > upper))
        else:
            outliers = np.unique(np.r_[np.argsort(token, kind="stable")[:k], np.argsort(-token, kind="stable")[:k]])
        residual = token - scale * levels[index]
        main = scale * (levels[index] * weight).sum(axis=1)
        rows.append(
            tensors["weight_scale"] * (main + weight[:, outliers] @ residual[outliers]) + tensors.get("bias", 0)
        )
    return np.array(rows)


@pytest.mark.parametrize(
    ("settings", "k"),
    [
        ({}, 2),  # ceil(0.02 * 61)
        ({"outlier_mode": "none"}, 0),
        ({"outlier_mode": "static"}, 0),
        ({"codebook_grid": "fp16"}, 2),
        ({"act_bits": 3}, 2),
        ({"weight_bits": 2, "act_bits": 1}, 2),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_output_against_numpy(make_layer: Make, settings: dict[str, object], k: int, bias: bool) -> None:
    layer = make_layer(9, 61, bias, **settings)
    x = torch.randn(6, 61, generator=torch.Generator().manual_seed(7))
    expected = expected_output(layer, x, k)
    # products of the fp16 grid are rounded to 11 bits
    tolerance = 2**-11 if settings.get("codebook_grid") == "fp16" else 1e-5
    assert np.linalg.norm(layer(x).numpy() - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize(("N", "K"), [(1, 1), (1, 7), (5, 2), (3, 16)])
def test_small_layers(make_layer: Make, N: int, K: int) -> None:
    layer = make_layer(N, K, bias=True)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1))
    expected = expected_output(layer, x, min(1, K // 2))
    assert np.allclose(layer(x).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_any_leading_shape(make_layer: Make) -> None:
    layer = make_layer(5, 12)
    x = torch.randn(2, 3, 4, 12)
    assert torch.equal(layer(x), layer(x.reshape(-1, 12)).reshape(2, 3, 4, 5))
    assert torch.equal(layer(x[0, 0, 0]), layer(x)[0, 0, 0])
    assert layer(x[:0]).shape == (0, 3, 4, 5)
    assert torch.equal(layer(x.transpose(0, 2)), layer(x).transpose(0, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_activations_are_widened_exactly(make_layer: Make, dtype: torch.dtype) -> None:
    layer = make_layer(5, 12, bias=True)
    x = torch.randn(4, 12).to(dtype)
    assert layer(x).dtype == dtype
    assert torch.equal(layer(x), layer(x.float()).to(dtype))


def test_zero_and_non_finite_tokens(make_layer: Make) -> None:
    layer = make_layer(5, 12, bias=True)
    x = torch.randn(3, 12)
    x[0] = 0
    x[1, 4] = torch.inf
    y = layer(x)
    assert torch.equal(y[0], layer.bias)
    assert y[1].isnan().all()
    assert torch.equal(y[2:], layer(x[2:]))


def test_no_gradient_passes(make_layer: Make) -> None:
    assert not make_layer(5, 12)(torch.randn(2, 12, requires_grad=True)).requires_grad


def test_state_is_what_the_format_declares(make_layer: Make) -> None:
    layer = make_layer(5, 13, bias=True, outlier_mode="static")
    declared = declare_layer("layer", layer.spec, torch.float32)
    state = {f"layer.{name}": (tuple(tensor.shape), tensor.dtype) for name, tensor in layer.state_dict().items()}
    assert state == declared
    assert not list(layer.parameters())


CASTS = {
    "to": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float64),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_leaves_the_numbers_of_the_format_alone(
    make_layer: Make, cast: Callable[[nn.Module], nn.Module]
) -> None:
    layer = make_layer(5, 12, bias=True, outlier_mode="static")
    x = torch.randn(4, 12)
    before, state = layer(x), copy.deepcopy(layer.state_dict())
    model = cast(nn.Sequential(layer))
    assert model[0] is layer
    for name, tensor in layer.state_dict().items():
        if name == "bias":
            assert tensor.dtype != torch.float32
        else:
            assert tensor.dtype == state[name].dtype
            assert torch.equal(tensor, state[name])
    layer.bias = state["bias"]
    assert torch.equal(layer(x), before)


def test_a_move_takes_everything_along(make_layer: Make) -> None:
    layer = make_layer(5, 12, bias=True).to("meta")
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
    back = layer.to_empty(device="cpu")
    assert back.weight_scale.dtype == torch.float16


def test_new_numbers_are_used_after_a_forward(make_layer: Make) -> None:
    layer, other = make_layer(5, 12), make_layer(5, 12)
    other.weight_scale.mul_(2)
    x = torch.randn(4, 12)
    before = layer(x)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))
    assert not torch.equal(layer(x), before)


def test_copies_and_pickles_compute_alike(make_layer: Make) -> None:
    layer = make_layer(5, 12, bias=True)
    x = torch.randn(4, 12)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)
    assert len(pickle.dumps(layer)) == len(pickle.dumps(make_layer(5, 12, bias=True)))


def test_dequantized_weights(make_layer: Make) -> None:
    layer = make_layer(5, 13)
    index = unpack_indices(layer.weight, 13).long()
    expected = layer.weight_scale.float()[:, None] * layer.weight_codebook.float()[index]
    assert torch.equal(layer.dequantize(), expected)


@pytest.fixture
def count_quantizations(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    seen: list[Tensor] = []

    def watch(x: Tensor, fmt: ActivationFormat) -> QuantizedActivations:
        seen.append(x)
        return quantize_activations(x, fmt)

    monkeypatch.setattr(module, "quantize_activations", watch)
    return seen


def test_layers_of_a_site_quantize_their_input_once(make_layer: Make, count_quantizations: list[Tensor]) -> None:
    gate, up = make_layer(5, 12), make_layer(7, 12)
    x = torch.randn(4, 12)
    together = gate(x), up(x)
    assert len(count_quantizations) == 1
    apart = gate(x.clone()), up(x.clone())
    assert len(count_quantizations) == 3
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def test_an_input_written_to_is_quantized_again(make_layer: Make, count_quantizations: list[Tensor]) -> None:
    layer = make_layer(5, 12)
    x = torch.randn(4, 12)
    layer(x)
    x.mul_(-3)
    assert torch.equal(layer(x), layer(x.clone()))
    with torch.inference_mode():
        y = torch.randn(4, 12)
        before = layer(y)
        y.mul_(-3)
        assert not torch.equal(layer(y), before)


@pytest.mark.parametrize(
    "settings", [{"act_bits": 3}, {"scale_kind": "rms"}, {"outlier_mode": "none"}, {"outlier_mode": "static"}]
)
def test_other_formats_of_the_same_input_are_kept_apart(make_layer: Make, settings: dict[str, object]) -> None:
    one, other = make_layer(5, 12), make_layer(5, 12, **settings)
    x = torch.randn(4, 12)
    one(x)
    assert torch.equal(other(x), other(x.clone()))
    shifted = make_layer(5, 12)
    shifted.act_codebook.mul_(0.5)
    shifted.codebook_steps[1] *= 0.5
    one(x)
    assert torch.equal(shifted(x), shifted(x.clone()))


def test_nothing_is_kept_once_the_input_is_gone(make_layer: Make) -> None:
    x = torch.randn(4, 12)
    make_layer(5, 12)(x)
    assert module._LAST_INPUT._kept is not None
    del x
    assert module._LAST_INPUT._kept is None


def test_repr_says_the_bits(make_layer: Make) -> None:
    assert repr(make_layer(5, 12, act_bits=3)) == "OasisLinear(in_features=12, out_features=5, bias=False, W4A3)"
