"""Models that cannot be used: status 3 and one line, whichever command meets them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Chain

Refused = Callable[..., str]
Copy = Callable[..., Path]
SHORT = ("--samples", 2, "--seqlen", 64)
WEIGHTS = "model.safetensors"


@pytest.fixture
def all_refuse(refused: Refused, chain: Chain) -> Callable[[object, str], None]:
    """Every command that opens a model says the same."""

    def run(model: object, said: str) -> None:
        for args in (
            ("calibrate", model, *SHORT, "--out", "new/calibration"),
            ("quantize", model, "--calibration", chain.calibration, "--out", "new/quantized"),
            ("eval", model, "--seqlen", 64, "--limit", 1),
            ("run", "demo-tiny", "--model", model, "--out", "new/run"),
            ("inspect", model),
        ):
            assert said in refused(*args), args

    return run


def test_a_folder_that_is_missing_or_empty(all_refuse: Callable[..., None], workspace: Path) -> None:
    all_refuse("./missing", "missing: not found; name a model folder, a GGUF file or a hub id")
    (workspace / "empty").mkdir()
    all_refuse("empty", "empty: holds no files; name a Hugging Face model folder or a GGUF file")


def test_a_name_that_is_neither_here_nor_on_the_hub(
    all_refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object, **options: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr("oasis_cli.models.checkpoint.snapshot_download", unreachable)
    all_refuse("someone/model", "no such folder here, and the hub does not give it (OSError); check the name")


def test_a_name_that_no_system_takes(all_refuse: Callable[..., None], refused: Refused) -> None:
    all_refuse("./" + 300 * "x", "cannot be read (File name too long)")
    refused("run", 300 * "x")
    refused("verify", 300 * "x")
    refused("run", "demo-tiny", "--model", ".", "--out", 300 * "x")


def test_a_folder_without_a_configuration(all_refuse: Callable[..., None], chain: Chain, copy_of: Copy) -> None:
    model = copy_of(chain.model)
    (model / "config.json").unlink()
    all_refuse(model, f"{model}: no config.json; name a Hugging Face model folder or a GGUF file")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("", "config.json: damaged, not JSON"),
        ("{", "config.json: damaged, not JSON"),
        ("[]", "config.json: damaged, holds list where an object is due"),
        ("{}", "architecture None is not supported"),
        ('{"model_type": "gpt2"}', "architecture 'gpt2' is not supported; supported are llama, mistral, qwen2"),
        ('{"model_type": "bert"}', "architecture 'bert' is not supported; supported are llama, mistral, qwen2"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config.json: damaged"),
        ('{"model_type": "llama", "hidden_size": -1}', "config.json: damaged"),
        (b"\xff\xfe", "config.json: damaged, not JSON"),
    ],
)
def test_bad_configurations(
    all_refuse: Callable[..., None], chain: Chain, copy_of: Copy, config: str | bytes, said: str
) -> None:
    model = copy_of(chain.model)
    (model / "config.json").write_bytes(config if isinstance(config, bytes) else config.encode())
    all_refuse(model, said)


def test_pickled_weights(all_refuse: Callable[..., None], chain: Chain, copy_of: Copy) -> None:
    model = copy_of(chain.model)
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    all_refuse(model, "only pickle weights (pytorch_model.bin), which may run code when loaded")


@pytest.mark.parametrize("share", [0, 1e-6, 3e-6, 0.0005, 0.01, 0.5, 0.999999])
def test_truncated_weights(all_refuse: Callable[..., None], chain: Chain, copy_of: Copy, share: float) -> None:
    model = copy_of(chain.model)
    whole = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(whole[: int(share * len(whole))])
    all_refuse(model, f"{model / WEIGHTS}: ")
    all_refuse(model, "truncated (")


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: 8 * b"\xff" + whole[8:],
        lambda whole: whole[:8] + b"x" + whole[9:],
        lambda whole: whole[:8] + whole[8:].replace(b'"F32"', b'"F33"', 1),
        lambda whole: whole + b"\0",
    ],
    ids=["length", "not JSON", "dtype", "too long"],
)
def test_a_damaged_header(
    all_refuse: Callable[..., None], chain: Chain, copy_of: Copy, damage: Callable[[bytes], bytes]
) -> None:
    model = copy_of(chain.model)
    (model / WEIGHTS).write_bytes(damage((model / WEIGHTS).read_bytes()))
    all_refuse(model, f"{model / WEIGHTS}: damaged")


def test_a_shard_that_is_missing(all_refuse: Callable[..., None], chain: Chain, copy_of: Copy) -> None:
    model = copy_of(chain.model)
    tensors = load_file(model / WEIGHTS)
    names = {name: f"model-0000{1 + (number % 2)}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, model / file, {"format": "pt"})
    (model / WEIGHTS).unlink()
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (model / "model-00002-of-00002.safetensors").unlink()
    all_refuse(model, f"{index}: names model-00002-of-00002.safetensors, which is absent")
    index.write_text("{")
    all_refuse(model, f"{index}: damaged, not JSON")
    index.unlink()
    all_refuse(model, "model-00001-of-00002.safetensors lacks its index")


def test_a_tensor_that_is_missing(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    model = copy_of(chain.model)
    tensors = load_file(model / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    assert "the weights lack model.norm.weight" in refused("calibrate", model, *SHORT, "--out", "a/b/c")
    assert "the weights lack model.norm.weight" in refused("eval", model, "--seqlen", 64)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(refused: Refused, chain: Chain, copy_of: Copy, value: float) -> None:
    model = copy_of(chain.model)
    tensors = load_file(model / WEIGHTS)
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    said = f"{model}: {name} holds NaN or infinity"
    assert said in refused("calibrate", model, *SHORT, "--out", "a/b/c")
    assert said in refused("eval", model, "--seqlen", 64)
    assert said in refused("verify", model, status=1)


def test_a_model_that_is_quantized_already(refused: Refused, chain: Chain) -> None:
    said = "already quantized (oasis); name the original model"
    assert said in refused("calibrate", chain.quantized, *SHORT, "--out", "o")
    assert said in refused("quantize", chain.quantized, "--calibration", chain.calibration, "--out", "o")
    assert said in refused("run", "demo-tiny", "--model", chain.quantized, "--out", "o")


def test_windows_beyond_the_models_positions(refused: Refused, chain: Chain) -> None:
    """The toy has 512 positions."""
    said = "has 512 positions, fewer than the seqlen of 1024"
    assert said in refused("calibrate", chain.model, "--samples", 1, "--seqlen", 1024, "--out", "o")
    assert said in refused("eval", chain.model, "--seqlen", 1024)
    assert said in refused("eval", chain.image, "--seqlen", 1024)
    assert said in refused("simulate", chain.image, "--decode", 4, "--functional", "--seqlen", 1024)
    assert "has 512 positions; ask for fewer" in refused("simulate", chain.image, "--decode", 513)
    assert "has 512 positions; ask for fewer" in refused("simulate", chain.image, "--prefill", 513)
    assert "has 512 positions; ask for fewer" in refused("simulate", chain.image, "--prefill", 512, "--decode", 1)


def test_a_tokenizer_that_is_missing_or_damaged(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    model, image = copy_of(chain.model), copy_of(chain.image, "image")
    for folder in (model, image):
        (folder / "tokenizer.json").write_text("{}")
        assert f"{folder}: the tokenizer cannot be loaded" in refused("eval", folder, "--seqlen", 64)
        (folder / "tokenizer.json").unlink()
        assert f"{folder}: no tokenizer files; copy tokenizer.json" in refused("eval", folder, "--seqlen", 64)
    assert "no tokenizer files" in refused("calibrate", model, *SHORT, "--out", "o")
    assert "no tokenizer files" in refused("simulate", image, "--decode", 4, "--functional", "--seqlen", 64)


def test_weights_beyond_float16(
    refused: Refused, done: Callable[..., object], one_block: Path, copy_of: Copy, workspace: Path
) -> None:
    model = copy_of(one_block)
    tensors = load_file(model / WEIGHTS)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name][0, 0] = 1e5
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    done("calibrate", model, "--samples", 1, "--seqlen", 64, "--out", "c")
    line = refused("quantize", model, "--calibration", "c", "--out", "q")
    assert f"{name}: weights up to 1e+05 do not fit a float16 scale; normalise the model's weights" in line


def test_a_calibration_is_no_model(refused: Refused, chain: Chain, workspace: Path) -> None:
    assert "a calibration yields no logits" in refused("eval", chain.calibration)
    shutil.copy(chain.calibration / "calibration.safetensors", workspace)
    assert "no config.json" in refused("calibrate", workspace, *SHORT, "--out", "o")


def test_a_model_of_another_number_type_is_no_reason_to_refuse(
    done: Callable[..., object], chain: Chain, copy_of: Copy
) -> None:
    """The other side of the refusals above: bfloat16 weights and no dtype in the configuration are fine."""
    model = copy_of(chain.model)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(model / WEIGHTS).items()}
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    done("eval", model, "--seqlen", 64, "--limit", 1)
