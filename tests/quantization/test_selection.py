"""Bits by layer, layers left alone, the cache and the output head: settings through to what the model computes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from oasis_cli.formats.quantized import QuantizationSpec
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.gemm import ActivationFormat, dequantized
from oasis_cli.quantization.sequential import BlockStream
from oasis_cli.runtime.loading import load
from tests.conftest import Chain

TOKENS = torch.arange(3, 67)[None]
SMALL = ("--feedback-samples", 1, "--tune-epochs", 0.5)

Quantize = Callable[..., Path]


@pytest.fixture
def quantize(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> Quantize:
    """Runs the command with some options; the folder."""

    def run(*options: object, method: str = "oasis") -> Path:
        out = tmp_path / f"q{len(list(tmp_path.iterdir()))}"
        more = SMALL if method == "oasis-plus" else ()
        args = ("quantize", chain.model, "--calibration", chain.calibration, "--method", method)
        done = cli(*args, *options, *more, "--out", out)
        assert done.exit_code == 0, done.stderr
        return out

    return run


def spec_of(folder: Path) -> QuantizationSpec:
    return QuantizationSpec.from_config(json.loads((folder / "config.json").read_text())["quantization_config"], "")


@pytest.mark.parametrize("method", ["oasis", "oasis-plus"])
def test_bits_by_layer(quantize: Quantize, cli: Callable[..., Result], tmp_path: Path, method: str) -> None:
    """Later patterns win; the image carries each layer's own bits and computes what the folder does."""
    folder = quantize(
        "--act-bits", 3, "--ignore", r"\.0\.mlp\.down", "--bits", "down_proj$=W3A4", "--bits", r"\.2\.mlp\.down=W2",
        method=method,
    )  # fmt: skip
    spec = spec_of(folder)
    bits = {name: (layer.weight_bits, layer.act_bits) for name, layer in spec.layers.items()}
    assert "model.layers.0.mlp.down_proj" not in bits
    assert bits.pop("model.layers.1.mlp.down_proj") == (3, 4)
    assert bits.pop("model.layers.2.mlp.down_proj") == (2, 4)
    assert bits.pop("model.layers.3.mlp.down_proj") == (3, 4)
    assert set(bits.values()) == {(4, 3)}
    assert len(bits) == 4 * 7 - 4
    tensors = load_file(folder / "model-00004-of-00005.safetensors")
    assert tensors["model.layers.2.mlp.down_proj.weight_codebook"].shape == (4,)
    assert tensors["model.layers.2.mlp.down_proj.act_codebook"].shape == (16,)
    assert cli("verify", folder).exit_code == 0
    done = cli("compile", folder, "--out", tmp_path / "image")
    assert done.exit_code == 0, done.stderr
    done = cli("simulate", tmp_path / "image", "--functional", "--reference", folder, "--seqlen", 32)
    assert done.exit_code == 0, done.stderr
    scores = [
        json.loads(cli("eval", each, "--limit", 1, "--seqlen", 32, "--json", "-").stdout)["perplexity"][0]["value"]
        for each in (folder, tmp_path / "image")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)


@pytest.mark.parametrize("method", ["oasis", "oasis-plus"])
def test_weights_alone(
    quantize: Quantize, chain: Chain, cli: Callable[..., Result], tmp_path: Path, method: str
) -> None:
    """A16: the model is the original with other weights, and nothing of activations is stored."""
    folder = quantize("--act-bits", 16, method=method)
    quantized = load(folder)
    original = open_checkpoint(chain.model).load_model()
    norms = {n: p for n, p in quantized.named_parameters() if "norm" in n}  # tuned
    for name, parameter in norms.items():
        original.get_parameter(name).copy_(parameter)
    for name in spec_of(folder).layers:
        original.get_submodule(name).weight.copy_(quantized.get_submodule(name).dequantize())
    with torch.no_grad():
        torch.testing.assert_close(
            quantized(input_ids=TOKENS).logits, original(input_ids=TOKENS).logits, atol=1e-4, rtol=1e-4
        )
    assert not any("act_codebook" in name for file in folder.glob("*.safetensors") for name in load_file(file))
    done = cli("compile", folder, "--out", tmp_path / "image")
    assert done.exit_code == 3
    assert "leaves its activations as they are" in done.stderr


def test_weights_alone_lose_less_than_both_sides(quantize: Quantize, chain: Chain, cli: Callable[..., Result]) -> None:
    losses = [
        json.loads(cli("eval", each, "--against", chain.model, "--seqlen", 128, "--limit", 4, "--json", "-").stdout)
        for each in (quantize("--act-bits", 16), chain.quantized)
    ]
    assert losses[0]["against"]["kl_mean"] < losses[1]["against"]["kl_mean"]


@pytest.mark.parametrize("method", ["oasis", "oasis-plus"])
def test_the_cache(quantize: Quantize, chain: Chain, cli: Callable[..., Result], tmp_path: Path, method: str) -> None:
    """Every head of every token of k_proj and v_proj is scale times centroid; the rest is as without."""
    folder = quantize("--kv-bits", 3, method=method)
    model, head_dim = load(folder), 128 // 4
    seen: dict[str, Tensor] = {}
    layer = model.model.layers[1].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer, name).register_forward_hook(lambda m, a, y, name=name: seen.update({name: y}))
    with torch.no_grad():
        model(input_ids=TOKENS)
    for name in ("k_proj", "v_proj"):
        heads = seen[name].reshape(-1, head_dim)
        codebook = getattr(layer, name).cache_codebook.float()
        assert codebook.shape == (8,)
        scale = heads.abs().amax(dim=1, keepdim=True)
        levels = torch.stack([row.unique() for row in (heads / scale).round(decimals=4)[:1]])
        assert levels.shape[1] <= 8
        # what is on the codebook stays there, once the scale is known
        fmt = ActivationFormat(Codebook(codebook.half()), spec_of(folder).scale_kind)
        assert float((dequantized(heads, fmt) - heads).norm() / heads.norm()) < 0.4
    assert all(len(row.unique()) > 8 for row in seen["q_proj"].reshape(-1, head_dim)[:5])
    assert cli("verify", folder).exit_code == 0
    done = cli("compile", folder, "--out", tmp_path / "image")
    assert done.exit_code == 3
    assert "keys and values are quantized" in done.stderr


def test_more_bits_of_the_cache_lose_less(quantize: Quantize, chain: Chain, cli: Callable[..., Result]) -> None:
    losses = [
        json.loads(cli("eval", each, "--against", chain.quantized, "--seqlen", 128, "--limit", 2, "--json", "-").stdout)
        for each in (quantize("--kv-bits", 1), quantize("--kv-bits", 2), quantize("--kv-bits", 4))
    ]
    divergences = [found["against"]["kl_mean"] for found in losses]
    assert divergences == sorted(divergences, reverse=True)


@pytest.mark.parametrize("method", ["oasis", "oasis-plus"])
def test_the_output_head(quantize: Quantize, chain: Chain, cli: Callable[..., Result], method: str) -> None:
    """Its weights are indices; the embedding that it was tied to stays as it is."""
    folder = quantize("--head-bits", 4, method=method)
    model, original = load(folder), open_checkpoint(chain.model).load_model()
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)
    head = model.get_output_embeddings().dequantize()
    wanted = original.get_output_embeddings().weight
    assert 0 < float((head - wanted).square().sum() / wanted.square().sum()) < 0.02
    with torch.no_grad():
        hidden = model.model(input_ids=TOKENS).last_hidden_state
        torch.testing.assert_close(model(input_ids=TOKENS).logits, hidden @ head.T, atol=1e-4, rtol=1e-4)
    assert cli("verify", folder).exit_code == 0


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--ignore", "q_porj"), 3, "no layer's name holds 'q_porj'; names are like model.layers."),
        (("--ignore", "("), 2, "is not a regular expression"),
        (("--ignore", "proj"), 3, "ignore names every layer"),
        (("--bits", "q_proj=A3"), 3, "both read the same ones"),
        (("--bits", "q_proj=5"), 2, "is not like 'down_proj$=W3A4'"),
        (("--bits", "q_proj="), 2, "is not like 'down_proj$=W3A4'"),
        (("--bits", "q_proj=W5"), 2, "must be one of 1, 2, 3, 4"),
        (("--kv-bits", 5), 2, "--kv-bits"),
        (("--head-bits", 0), 2, "--head-bits"),
    ],
)
def test_impossible_choices(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], options: tuple[object, ...], status: int, said: str
) -> None:
    args = ("quantize", chain.model, "--calibration", chain.calibration, "--method", "oasis")
    done = cli(*args, *options, "--out", tmp_path / "q")
    assert (done.exit_code, said in done.stderr, done.stderr.count("\n")) == (status, True, 1), done.stderr
    assert not (tmp_path / "q").exists()


def test_the_recipe_says_the_same(quantize: Quantize, chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "quantize:\n  method: oasis\n  ignore: ['o_proj$']\n  overrides:\n"
        "    - {layers: 'mlp', weight_bits: 3}\n  kv_bits: 4\n"
    )
    args = ("quantize", chain.model, "--calibration", chain.calibration, "--recipe", recipe, "--out", tmp_path / "r")
    assert cli(*args).exit_code == 0
    by_options = quantize("--ignore", "o_proj$", "--bits", "mlp=W3", "--kv-bits", 4)
    for path in by_options.glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "r" / path.name).read_bytes()


@pytest.mark.parametrize("change", ["method=rtn", "act_bits=16", "kv_bits=4", "head_bits=4"])
def test_a_run_says_beforehand_what_the_accelerator_cannot_do(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], change: str
) -> None:
    method = () if change.startswith("method") else ("--set", "quantize.method=oasis")
    done = cli(
        "run", "demo-tiny", "--model", chain.model, *method, "--set", f"quantize.{change}", "--out", tmp_path / "r"
    )
    assert done.exit_code == 3
    assert "cannot run " + change.replace("=", " ") in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cache": {"bits": 5, "head_dim": 32}}, "cache is"),
        ({"cache": {"bits": 4, "head_dim": 33}}, "cache is"),
        ({"cache": [4, 32]}, "cache is"),
        ({"act_bits": 8}, "act_bits is 8"),
    ],
)
def test_a_damaged_specification(
    quantize: Quantize, cli: Callable[..., Result], change: dict[str, Any], said: str
) -> None:
    folder = quantize("--kv-bits", 4)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    done = cli("eval", folder, "--limit", 1, "--seqlen", 64)
    assert done.exit_code == 3
    assert said in done.stderr


def test_a_codebook_of_the_cache_that_descends_is_damage(quantize: Quantize, cli: Callable[..., Result]) -> None:
    folder = quantize("--kv-bits", 2)
    file = folder / "model-00002-of-00005.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.k_proj.cache_codebook"
    save_file(tensors | {name: tensors[name].flip(0)}, file, {"format": "pt"})
    done = cli("verify", folder)
    assert done.exit_code == 1


def test_saved_again_it_is_the_same_model(quantize: Quantize, tmp_path: Path, cli: Callable[..., Result]) -> None:
    """By transformers, with everything at once that a specification can say."""
    folder = quantize("--bits", "mlp=W3", "--ignore", r"\.0\.", "--kv-bits", 4, "--head-bits", 4)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    assert spec_of(folder) == spec_of(tmp_path / "again")
    with torch.no_grad():
        logits = [load(each)(input_ids=TOKENS).logits for each in (folder, tmp_path / "again")]
    assert torch.equal(*logits)
    said = cli("inspect", tmp_path / "again").stdout
    assert "W3A4" in said
    assert "W4A16" in said


def test_it_generates_the_same_with_and_without_a_cache(quantize: Quantize) -> None:
    """Keys and values are quantized before they are kept, so that keeping them changes nothing."""
    model = load(quantize("--kv-bits", 3))
    texts = [
        model.generate(TOKENS[:, :8], max_new_tokens=12, do_sample=False, use_cache=kept) for kept in (True, False)
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize("method", ["oasis-plus", "quarot"])
def test_a_block_left_alone_is_still_passed(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Later blocks see what it gives: every block is passed once, in order."""
    passed: list[int] = []
    advance = BlockStream.advance

    def note(self: BlockStream, number: int, *args: Any) -> None:
        passed.append(number)
        advance(self, number, *args)

    monkeypatch.setattr(BlockStream, "advance", note)
    more = ("--tune-epochs", 0) if method == "oasis-plus" else ()
    args = ("quantize", chain.model, "--calibration", chain.calibration, "--method", method, *more)
    done = cli(*args, "--feedback-samples", 1, "--ignore", r"layers\.1\.", "--out", tmp_path / "q")
    assert done.exit_code == 0, done.stderr
    assert passed == [0, 1, 2, 3]
