"""Methods to compare with: what they compute, by definitions worked out here, and how their folders behave."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from oasis_cli.formats.baseline import BASELINES, BaselineLayer, Rounding
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.numerics.uniform import round_to_integers
from oasis_cli.quantization.baselines.equivalences import rotate_model, smooth
from oasis_cli.quantization.baselines.integer_weights import bits_a_weight, gptq, round_weight, search_clip
from oasis_cli.runtime.baseline import BaselineLinear, round_channels
from oasis_cli.runtime.loading import load
from tests.conftest import Chain

TOKENS = torch.arange(3, 67)[None]


def quantized_by(chain: Chain, out: Path, cli: Callable[..., Result], *options: object) -> Path:
    done = cli("quantize", chain.model, "--calibration", chain.calibration, "--out", out, *options)
    assert done.exit_code == 0, done.stderr
    return out


def logits_of(folder: Path) -> Tensor:
    with torch.no_grad():
        logits: Tensor = load(folder)(input_ids=TOKENS).logits
    return logits


@pytest.mark.parametrize("method", ["rtn", "smoothquant", "quarot", "atom"])
def test_without_rounding_the_model_computes_what_it_did(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], method: str
) -> None:
    """Rotations, scalings and reordering alone change nothing: W16A16."""
    folder = quantized_by(chain, tmp_path / "q", cli, "--method", method, "--weight-bits", 16, "--act-bits", 16)
    with torch.no_grad():
        wanted = open_checkpoint(chain.model).load_model()(input_ids=TOKENS).logits
    torch.testing.assert_close(logits_of(folder), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("ignored", ["o_proj", "mlp", r"\.1\.", "q_proj"])
@pytest.mark.parametrize("method", ["smoothquant", "quarot", "atom"])
def test_layers_left_alone_stay_equivalent(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], method: str, ignored: str
) -> None:
    """What is rotated or scaled around a layer that is left alone still adds up to the original."""
    bits = ("--weight-bits", 16, "--act-bits", 16)
    folder = quantized_by(chain, tmp_path / "q", cli, "--method", method, *bits, "--ignore", ignored)
    with torch.no_grad():
        wanted = open_checkpoint(chain.model).load_model()(input_ids=TOKENS).logits
    torch.testing.assert_close(logits_of(folder), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("method", BASELINES)
def test_every_method_quantizes_evaluates_and_verifies(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], method: str
) -> None:
    folder = quantized_by(chain, tmp_path / "q", cli, "--method", method)
    for command in (("eval", folder, "--limit", 1, "--seqlen", 64), ("inspect", folder), ("verify", folder)):
        done = cli(*command)
        assert done.exit_code == 0, done.stderr
    report = json.loads((folder / "quantization_report.json").read_text())
    assert len(report["layers"]) == 4 * 7
    assert 0 < report["totals"]["relative_error"] < 0.04
    refused = cli("compile", folder, "--out", tmp_path / "image")
    assert refused.exit_code == 3
    assert "not by oasis" in refused.stderr


def test_rtn_is_a_few_lines(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    """Every weight and every token's value on its own scale of absmax / 7, computed here in plain torch."""
    folder = quantized_by(chain, tmp_path / "q", cli, "--method", "rtn")

    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True) / 7
        return torch.where(scale > 0, (x / scale).round().clamp(-8, 7) * scale, 0.0)

    model = open_checkpoint(chain.model).load_model()
    for block in model.model.layers:
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(rounded(module.weight))
                module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(folder), model(input_ids=TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_feedback_loses_less_of_the_output_than_rounding() -> None:
    draw = torch.Generator().manual_seed(0)
    mixing = torch.randn(48, 48, generator=draw)
    x = torch.randn(400, 48, generator=draw) @ mixing
    weight = torch.randn(20, 48, generator=draw)
    moments = (x.T @ x).double()
    for rounding in (Rounding("integer", 4), Rounding("integer", 4, 16), Rounding("integer", 4, 16, 0.9, 8)):
        order = torch.randperm(48, generator=draw) if rounding.wide_channels else None
        errors = [
            float(((found - weight) @ x.T).square().sum())
            for found in (gptq(weight, moments, rounding, order), round_weight(weight, rounding, order))
        ]
        assert errors[0] < 0.8 * errors[1]


def test_feedback_rounds_to_the_grid_of_its_groups() -> None:
    """Wide channels lie on 8-bit grids, each group of the others on 16 levels of its own."""
    draw = torch.Generator().manual_seed(3)
    weight, order = torch.randn(5, 40, generator=draw), torch.randperm(40, generator=draw)
    rounding = Rounding("integer", 4, 16, 1.0, 8)
    found = gptq(weight, torch.eye(40, dtype=torch.float64), rounding, order)
    for start in (0, 16):
        channels = order[start : start + 16]
        scale = weight[:, channels].abs().amax(dim=1, keepdim=True) / 7
        levels = found[:, channels] / scale
        torch.testing.assert_close(levels, levels.round())
        assert float(levels.abs().max()) <= 8
    wide = order[32:]
    levels = found[:, wide] / (weight[:, wide].abs().amax(dim=1, keepdim=True) / 127)
    torch.testing.assert_close(levels, levels.round(), atol=1e-3, rtol=0)


def test_the_search_for_a_clip_is_no_worse_than_none() -> None:
    weight = torch.randn(30, 200, generator=torch.Generator().manual_seed(1)).pow(3)
    scale = search_clip(weight, 4)
    clipped = (weight / scale).round().clamp(-8, 7) * scale
    whole = round_to_integers(weight, 4)
    assert bool(((clipped - weight).abs().pow(2.4).sum(1) <= (whole - weight).abs().pow(2.4).sum(1) * 1.0001).all())
    assert bool((search_clip(torch.zeros(2, 8), 4) > 0).all())


def test_reordered_channels_by_hand() -> None:
    """Channels 1 and 3 in a group of two; 0 and 2, last in the order, at 8 bits: 127 levels of 254."""
    x = torch.tensor([[254.0, 7.0, 3.0, 2.4]])
    order = torch.tensor([1, 3, 0, 2])
    found = round_channels(x, Rounding("integer", 4, 2, 1.0, 2), order)
    assert found.tolist() == [[254.0, 7.0, 4.0, 2.0]]  # 3 / 2 = 1.5 goes to the even 2


def test_bits_a_weight_by_hand() -> None:
    assert bits_a_weight(64, Rounding("integer", 4)) == 4 + 16 / 64
    assert bits_a_weight(256, Rounding("integer", 4, 128)) == 4 + 16 / 128
    assert bits_a_weight(160, Rounding("integer", 4, 128, 1.0, 32)) == (128 * 4 + 32 * 8 + 2 * 16) / 160
    assert (bits_a_weight(64, Rounding("mxfp4")), bits_a_weight(64, Rounding("nvfp4"))) == (4.25, 4.5)
    assert bits_a_weight(64, Rounding()) == 16


def test_same_bytes_twice(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    one, two = (quantized_by(chain, tmp_path / name, cli, "--method", "quarot") for name in ("one", "two"))
    for path in one.iterdir():
        if path.name != "quantization_report.json":  # it holds seconds
            assert path.read_bytes() == (two / path.name).read_bytes(), path.name


def test_saved_again_it_is_the_same_model(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    folder = quantized_by(chain, tmp_path / "q", cli, "--method", "atom", "--wide-channels", 16)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(folder), logits_of(tmp_path / "again"))


def test_a_rotation_that_does_not_exist_is_said(tmp_path: Path, cli: Callable[..., Result], shared_data: Path) -> None:
    """The MLP of this real model is 172 wide: no power of two times an order of Paley's."""
    model = shared_data / "models" / "stories260K"
    source = next(
        path for path in (model, *model.iterdir()) if path.suffix == ".gguf" or (path / "config.json").is_file()
    )
    done = cli("calibrate", source, "--samples", 1, "--seqlen", 32, "--out", tmp_path / "c")
    assert done.exit_code == 0, done.stderr
    done = cli("quantize", source, "--calibration", tmp_path / "c", "--method", "quarot", "--out", tmp_path / "q")
    assert done.exit_code == 3
    assert "needs a Hadamard matrix of order 172" in done.stderr
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--method", "mxfp4", "--act-bits", 8), "--act-bits: must be one of 4, 16 for mxfp4, got 8"),
        (
            ("--method", "rtn", "--weight-bits", 1),
            "--weight-bits: must be one of 2, 3, 4, 5, 6, 7, 8, 16 for rtn, got 1",
        ),
        (("--method", "oasis", "--weight-bits", 5), "--weight-bits: must be one of 1, 2, 3, 4 for oasis, got 5"),
        (("--method", "rtn", "--kv-bits", 4), "--kv-bits: a setting of oasis-plus, oasis, oasis-s, not of rtn"),
        (("--method", "rnt"), "rtn"),
    ],
)
def test_impossible_settings(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], options: tuple[object, ...], said: str
) -> None:
    done = cli("quantize", chain.model, "--calibration", chain.calibration, "--out", tmp_path / "q", *options)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (tmp_path / "q").exists()


def test_damage_is_found(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    folder = quantized_by(chain, tmp_path / "q", cli, "--method", "rtn")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["act_bits"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    assert cli("verify", folder).exit_code == 1
    for key, value in (("layers", {}), ("method", "best"), ("act_bits", "4"), ("schema_version", 99)):
        broken = config | {"quantization_config": config["quantization_config"] | {key: value}}
        (folder / "config.json").write_text(json.dumps(broken))
        done = cli("eval", folder, "--limit", 1, "--seqlen", 64)
        assert (done.exit_code, done.stderr.count("\n")) == (3, 1), done.stderr


def test_layers_named_wrong_are_refused(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    folder = quantized_by(chain, tmp_path / "q", cli, "--method", "rtn")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["layers"]["model.layers.9.mlp.up_proj"] = config["quantization_config"]["layers"][
        "model.layers.0.mlp.up_proj"
    ]
    (folder / "config.json").write_text(json.dumps(config))
    done = cli("eval", folder, "--limit", 1, "--seqlen", 64)
    assert done.exit_code == 3
    assert "names model.layers.9.mlp.up_proj, which the model lacks" in done.stderr


def test_the_layer_rotates_before_it_rounds() -> None:
    """A token with one large channel: its rotation has equal magnitudes, which 2-bit integers -1 and 1 hold exactly."""
    layer = BaselineLinear(16, 16, False, BaselineLayer(True, Rounding("integer", 2), 16.0))
    with torch.no_grad():
        layer.weight.copy_(torch.eye(16))
        y = layer(torch.nn.functional.one_hot(torch.tensor([5]), 16) * 8.0)
    torch.testing.assert_close(y.abs(), torch.full((1, 16), 2.0))  # 8 / sqrt(16)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_rotations_and_scalings_change_nothing_in_any_family(family: str) -> None:
    """Random models with biases where the family has them, norms that are not one, heads tied and not."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING[family](
        vocab_size=40, num_key_value_heads=2, tie_word_embeddings=family != "mistral", **sizes
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.normal_(1, 0.3)
    tokens = torch.randint(0, 40, (2, 9))
    before = model(input_ids=tokens).logits
    largest = {
        name: torch.rand(module.in_features) * 9
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    smooth(model, largest, 0.5)
    torch.testing.assert_close(model(input_ids=tokens).logits, before, atol=1e-4, rtol=1e-4)
    rotated = rotate_model(model, 1, largest)
    torch.testing.assert_close(model(input_ids=tokens).logits, before, atol=1e-4, rtol=1e-4)
    assert sorted(rotated) == sorted(
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")
    )
    assert bool((model.model.norm.weight == 1).all())
