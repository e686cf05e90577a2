"""Does `verify_quantized` find every kind of damage, and call nothing damaged that is not?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oasis_cli.errors import CheckError, InputError
from oasis_cli.runtime.verification import verify_quantized

UP = "model.layers.0.mlp.up_proj"
KEY = "model.layers.1.self_attn.k_proj"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "settings", [{}, {"outlier_mode": "static"}, {"codebook_grid": "fp16"}, {"weight_bits": 3, "act_bits": 1}]
)
def test_sound_folders_pass(make_folder: Any, family: str, settings: dict[str, Any]) -> None:
    checked = verify_quantized(make_folder(family, **settings).path)
    assert any("14 quantized layers" in line for line in checked)


def test_progress_adds_up(folder: Any) -> None:
    class Counting:
        done = total = 0

        def task(self, description: str, total: int, unit: str = "") -> "Counting":
            self.total = total
            return self

        def __enter__(self) -> "Counting":
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def advance(self, n: int = 1) -> None:
            self.done += n

    progress = Counting()
    verify_quantized(folder.path, progress)
    assert progress.done == progress.total > 70


def change(name: str, edit: Callable[[Tensor], object]) -> Callable[[Any], None]:
    """Edits a tensor and lists the files anew: damage that no digest shows."""
    return lambda folder: folder.edit_tensors(lambda tensors: edit(tensors[name]))


VALUES: dict[str, tuple[Callable[[Any], None], str]] = {
    "scale": (
        change(f"{UP}.weight_scale", lambda t: t[3:4].fill_(torch.nan)),
        f"{UP} has NaN or infinity in its weight_scale",
    ),
    "codebook": (
        change(f"{UP}.weight_codebook", lambda t: t[-1:].fill_(torch.inf)),
        f"{UP} has NaN or infinity in its weight_codebook",
    ),
    "order": (
        change(f"{UP}.weight_codebook", lambda t: t.copy_(t.flip(0))),
        f"{UP} has a weight_codebook that does not ascend",
    ),
    "grid": (
        change(f"{UP}.weight_codebook", lambda t: t[8:9].add_(2**-9)),
        f"{UP} has a weight_codebook that is not on the int8 grid of step 0.0078125",
    ),
    "step": (change(f"{KEY}.codebook_steps", lambda t: t.zero_()), "is not on the int8 grid of step 0.0"),
    "site": (
        change(f"{KEY}.act_codebook", lambda t: t[0:1].fill_(-127 / 128)),
        f"{KEY} has another act_codebook than model.layers.1.self_attn.q_proj, which reads the same site",
    ),
    "padding": (
        change(f"{DOWN}.weight", lambda t: t[:, -1].bitwise_or_(0x10)),
        f"{DOWN} has something in the padding after its last index",
    ),
    "embedding": (
        change("model.embed_tokens.weight", lambda t: t[0, :1].fill_(torch.nan)),
        "model.embed_tokens.weight holds NaN",
    ),
    "norm": (change("model.norm.weight", lambda t: t[:1].fill_(torch.inf)), "model.norm.weight holds NaN or infinity"),
    "dtype": (
        lambda f: f.edit_tensors(lambda t: t.update({f"{UP}.act_codebook": t[f"{UP}.act_codebook"].float()})),
        "is due",
    ),
    "gone": (lambda f: f.edit_tensors(lambda t: t.pop(f"{UP}.weight")), f"lacks {UP}.weight"),
    "newer": (lambda f: f.edit_config(schema_version=7), "written by a newer version of oasis"),
    "bits": (lambda f: f.edit_config(act_bits=0), "damaged quantization_config (act_bits is 0)"),
}


@pytest.mark.parametrize(("damage", "complaint"), VALUES.values(), ids=VALUES)
def test_values_that_cannot_be_right(folder: Any, damage: Callable[[Any], None], complaint: str) -> None:
    damage(folder)
    with pytest.raises(CheckError) as caught:
        verify_quantized(folder.path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_index_beyond_its_bits(make_folder: Any) -> None:
    folder = make_folder(weight_bits=3)
    change(f"{UP}.weight", lambda t: t[0, :1].fill_(0x80))(folder)
    with pytest.raises(CheckError, match="up_proj has a weight index of 8, beyond 3 bits"):
        verify_quantized(folder.path)


def test_thresholds(make_folder: Any) -> None:
    folder = make_folder(outlier_mode="static")
    for name in ("gate_proj", "up_proj"):
        change(f"model.layers.0.mlp.{name}.act_thresholds", lambda t: t.copy_(torch.tensor([1.0, -1.0])))(folder)
    with pytest.raises(CheckError, match=r"gate_proj has thresholds that descend.*\(and 1 more\)"):
        verify_quantized(folder.path)


def test_infinite_thresholds_are_none(make_folder: Any) -> None:
    """A site without outliers has thresholds, not infinities: they are numbers of the format and must be finite."""
    folder = make_folder(outlier_mode="static")
    change(f"{DOWN}.act_thresholds", lambda t: t.fill_(torch.inf))(folder)
    with pytest.raises(CheckError, match="down_proj has NaN or infinity in its act_thresholds"):
        verify_quantized(folder.path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_any_changed_byte_of_a_listed_file(folder: Any, name: str) -> None:
    file = folder.path / name
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x20
    file.write_bytes(data)
    with pytest.raises(CheckError):
        verify_quantized(folder.path)


def test_files_that_are_gone_or_not_listed(folder: Any) -> None:
    report = folder.path / "quantization_report.json"
    folder.report({"absent.json": "sha256:00"})
    with pytest.raises(CheckError, match=r"lacks absent\.json, which quantization_report\.json lists"):
        verify_quantized(folder.path)
    folder.report({"../config.json": "sha256:00"})
    with pytest.raises(CheckError, match="lacks"):
        verify_quantized(folder.path)
    for files in ({}, []):
        folder.report(files)
        with pytest.raises(CheckError, match="damaged, lists no files"):
            verify_quantized(folder.path)
    report.write_text("{}")
    with pytest.raises(CheckError, match="not a quantized-model"):
        verify_quantized(folder.path)
    report.unlink()
    with pytest.raises(CheckError, match=r"lacks quantization_report\.json"):
        verify_quantized(folder.path)


def test_truncated_weights(folder: Any) -> None:
    folder.weights.write_bytes(folder.weights.read_bytes()[:-100])
    with pytest.raises(CheckError, match=r"truncated \("):
        verify_quantized(folder.path)


def test_folders_of_others_are_bad_input(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match="no folder that oasis quantize wrote"):
            verify_quantized(path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="no folder that oasis quantize wrote"):
        verify_quantized(tmp_path)
