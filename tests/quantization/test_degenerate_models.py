"""Every method on models with nothing in places: dead channels, whole matrices of zeros, layers of one channel."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers import LlamaForCausalLM, PreTrainedModel

from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.quantization import METHODS
from oasis_cli.runtime.loading import load
from tests.conftest import Chain, run_cli

SMALL = ("--feedback-samples", 1, "--tune-epochs", 0.5)


def with_dead_channels(source: Path, out: Path) -> None:
    """Input channels without weights, output channels of zeros, and a matrix of nothing else."""
    model = open_checkpoint(source).load_model()
    first, second = model.model.layers[0], model.model.layers[1]
    first.input_layernorm.weight[::3] = 0  # a third of what q, k and v read: H is singular
    first.self_attn.q_proj.weight[5] = 0
    first.mlp.up_proj.weight[7:11] = 0  # and so four input channels of down_proj
    second.self_attn.o_proj.weight[:] = 0
    second.mlp.down_proj.weight[:, 3] = 0
    _save(model, source, out)


def with_an_mlp_of_one_channel(source: Path, out: Path) -> None:
    """gate and up have N = 1, down has K = 1; there is no room for an outlier a side."""
    config = open_checkpoint(source).config
    config.intermediate_size = 1
    torch.manual_seed(0)
    _save(LlamaForCausalLM(config).eval().requires_grad_(False), source, out)


def _save(model: PreTrainedModel, source: Path, out: Path) -> None:
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((source / name).read_bytes())


MODELS = {"dead": with_dead_channels, "one-channel": with_an_mlp_of_one_channel}


@pytest.fixture(scope="module", params=MODELS)
def calibrated(request: pytest.FixtureRequest, chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with such a model and its calibration."""
    folder = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](chain.model, folder / "model")
    args = ("--samples", 3, "--seqlen", 64, "--out", folder / "calibration")
    done = run_cli("calibrate", folder / "model", *args)
    assert done.exit_code == 0, done.stderr
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_them(calibrated: Path, tmp_path: Path, cli: Callable[..., Result], method: str) -> None:
    model, out = calibrated / "model", tmp_path / "q"
    more = SMALL if method == "oasis-plus" else ()
    done = cli("quantize", model, "--calibration", calibrated / "calibration", "--method", method, *more, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert cli("verify", out).exit_code == 0
    found = cli("eval", out, "--against", model, "--seqlen", 64, "--limit", 2, "--json", "-")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["against"]["kl_mean"] < 0.5


def test_what_is_dead_stays_dead(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    """Zero output channels and zero matrices are reproduced exactly, by the method that moves most."""
    with_dead_channels(chain.model, tmp_path / "m")
    assert cli("calibrate", tmp_path / "m", "--samples", 2, "--seqlen", 64, "--out", tmp_path / "c").exit_code == 0
    args = ("quantize", tmp_path / "m", "--calibration", tmp_path / "c", *SMALL, "--out", tmp_path / "q")
    assert cli(*args).exit_code == 0
    layers = load(tmp_path / "q").model.layers
    assert not layers[0].self_attn.q_proj.dequantize()[5].any()
    assert not layers[0].mlp.up_proj.dequantize()[7:11].any()
    assert not layers[1].self_attn.o_proj.dequantize().any()


@pytest.mark.parametrize("fraction", [0, 0.05, 0.5])
@pytest.mark.parametrize("method", ["oasis", "oasis-s", "oasis-plus"])
def test_outlier_fractions_from_none_to_all(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], method: str, fraction: float
) -> None:
    """0 leaves none; half a side leaves nothing to cluster, which is said."""
    args = ("--samples", 2, "--seqlen", 64, "--outliers", fraction, "--out", tmp_path / "c")
    done = cli("calibrate", chain.model, *args)
    if fraction == 0.5:
        assert done.exit_code == 3
        assert "nothing but zeros and outliers" in done.stderr
        return
    more = SMALL if method == "oasis-plus" else ()
    done = cli(
        "quantize", chain.model, "--calibration", tmp_path / "c", "--method", method, *more, "--out", tmp_path / "q"
    )
    assert done.exit_code == 0, done.stderr
    spec = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    mode = {"oasis-s": "static"}.get(method, "dynamic")
    assert (spec["outlier_fraction"], spec["outlier_mode"]) == (fraction, mode if fraction else "none")
    assert cli("eval", tmp_path / "q", "--seqlen", 64, "--limit", 1).exit_code == 0
