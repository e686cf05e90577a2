import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from oasis_cli.calibration import CalibrationSettings, calibrate
from oasis_cli.errors import InputError
from oasis_cli.formats.quantized import QuantizationSpec, declare_layer
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.quantization import QuantizationSettings, quantize
from oasis_cli.runtime.loading import load
from tests.conftest import Chain


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def test_every_declared_tensor_is_there_and_the_rest_is_the_original(chain: Chain) -> None:
    config = json.loads((chain.quantized / "config.json").read_text())
    spec = QuantizationSpec.from_config(config["quantization_config"], "config.json")
    assert len(spec.layers) == 4 * 7
    found, original = all_tensors(chain.quantized), all_tensors(chain.model)
    declared = {key: form for name in spec.layers for key, form in declare_layer(name, spec).items()}
    for name, (shape, dtype) in declared.items():
        assert (found[name].shape, found[name].dtype) == (shape, dtype)
    for name in found.keys() - declared.keys():
        assert torch.equal(found[name], original[name])
    assert found.keys() - declared.keys() == {
        name for name in original if name.removesuffix(".weight") not in spec.layers
    }
    index = json.loads((chain.quantized / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_tied_head_is_not_stored_twice(chain: Chain) -> None:
    assert "lm_head.weight" not in all_tensors(chain.quantized)
    model = load(chain.quantized)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_report_adds_up(chain: Chain) -> None:
    report = json.loads((chain.quantized / "quantization_report.json").read_text())
    original = all_tensors(chain.model)
    quantized = load(chain.quantized)
    signal = noise = 0.0
    for name, entry in report["layers"].items():
        weight = original[f"{name}.weight"].double()
        error = (weight - quantized.get_submodule(name).dequantize().double()).square().sum()
        assert entry["relative_error"] == pytest.approx(float(error / weight.square().sum()), rel=1e-5)
        signal, noise = signal + float(weight.square().sum()), noise + float(error)
    assert report["totals"]["relative_error"] == pytest.approx(noise / signal, rel=1e-5)
    assert report["totals"]["bytes_before"] == sum(2 * e["K"] * e["N"] for e in report["layers"].values())
    files = {path.name for path in chain.quantized.iterdir()}
    assert report["files"].keys() == files - {"quantization_report.json", "README.md"}
    assert {"config.json", "tokenizer.json", "README.md"} <= files


def test_same_bytes_twice(chain: Chain, tmp_path: Path) -> None:
    quantize(open_checkpoint(chain.model), tmp_path / "again", chain.calibration, QuantizationSettings(method="oasis"))
    for path in chain.quantized.iterdir():
        if path.name != "quantization_report.json":  # it holds seconds
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_an_interrupted_run_resumes_to_the_same_bytes(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oasis_cli.quantization import methods

    real: Callable[..., object] = methods.quantize_weight
    done: list[str] = []

    def interrupted(weight, bits, grid, name, seed):  # type: ignore[no-untyped-def]
        if len(done) == 10:
            raise KeyboardInterrupt
        done.append(name)
        return real(weight, bits, grid, name, seed)

    checkpoint = open_checkpoint(chain.model)
    monkeypatch.setattr(methods, "quantize_weight", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(checkpoint, tmp_path / "out", chain.calibration, QuantizationSettings(method="oasis"))
    first = done[:7]  # the first block was finished, the second not
    done.clear()
    monkeypatch.setattr(methods, "quantize_weight", lambda *args: done.append(args[3]) or real(*args))
    quantize(checkpoint, tmp_path / "out", chain.calibration, QuantizationSettings(method="oasis"), resume=True)
    assert len(done) == 21
    assert not set(done) & set(first)
    for path in chain.quantized.iterdir():
        if path.name != "quantization_report.json":
            assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        (QuantizationSettings(method="oasis-s"), "static"),
        (QuantizationSettings(weight_bits=3, act_bits=3), "dynamic"),
        (QuantizationSettings(weight_bits=2, codebook_grid="fp16"), "dynamic"),
    ],
)
def test_other_formats_load_and_run(chain: Chain, tmp_path: Path, settings: QuantizationSettings, mode: str) -> None:
    quantize(open_checkpoint(chain.model), tmp_path / "out", chain.calibration, settings)
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (block["outlier_mode"], block["weight_bits"], block["codebook_grid"]) == (
        mode,
        settings.weight_bits,
        settings.codebook_grid,
    )
    logits = load(tmp_path / "out")(input_ids=torch.arange(20)[None]).logits
    assert logits.isfinite().all()


def test_without_outliers(chain: Chain, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(chain.model)
    calibrate(checkpoint, tmp_path / "cal", CalibrationSettings(samples=1, seqlen=64, outlier_fraction=0.0))
    quantize(checkpoint, tmp_path / "out", tmp_path / "cal", QuantizationSettings(method="oasis"))
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block["outlier_mode"] == "none"
    assert load(tmp_path / "out")(input_ids=torch.arange(20)[None]).logits.isfinite().all()


def test_calibration_of_another_model_is_refused(chain: Chain, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(chain.model, other, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="made for another model"):
        quantize(open_checkpoint(other), tmp_path / "out", chain.calibration, QuantizationSettings(method="oasis"))
    assert not (tmp_path / "out").exists()


def test_other_outliers_than_calibrated_are_refused(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"calibrated with outliers 0\.005, not 0\.01"):
        quantize(
            open_checkpoint(chain.model),
            tmp_path / "out",
            chain.calibration,
            QuantizationSettings(outlier_fraction=0.01),
        )


def test_bfloat16_weights_stay_bfloat16(chain: Chain, tmp_path: Path) -> None:
    model = open_checkpoint(chain.model).load_model(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chain.model / name, tmp_path / "bf16" / name)
    checkpoint = open_checkpoint(tmp_path / "bf16")
    assert checkpoint.dtype == torch.bfloat16
    calibrate(checkpoint, tmp_path / "cal", CalibrationSettings(samples=1, seqlen=64))
    quantize(checkpoint, tmp_path / "out", tmp_path / "cal", QuantizationSettings(method="oasis"))
    with safe_open(tmp_path / "out" / "model-00001-of-00005.safetensors", "pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"
