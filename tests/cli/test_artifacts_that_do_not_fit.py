"""Artifacts of newer versions, damaged ones, and ones that do not belong together: status 3, one line."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from oasis_cli.formats.manifest import write_sealed
from tests.conftest import Chain

Refused = Callable[..., str]
Copy = Callable[..., Path]


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_newer_calibration(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    folder = copy_of(chain.calibration)
    edit_json(folder / "calibration.json", schema_version=99)
    said = "calibration.json: written by a newer version of oasis (schema 99, known up to 1); upgrade oasis"
    assert said in refused("quantize", chain.model, "--calibration", folder, "--out", "o")
    assert said in refused("inspect", folder)
    assert said in refused("verify", folder, status=1)
    short = ("--samples", 4, "--seqlen", 128)
    assert said in refused("calibrate", chain.model, *short, "--out", folder, "--resume")


def test_a_newer_quantized_folder(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    folder = copy_of(chain.quantized)
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_json(folder / "config.json", quantization_config=block | {"schema_version": 99})
    said = "config.json: written by a newer version of oasis (schema 99, known up to 1); upgrade oasis"
    assert said in refused("compile", folder, "--out", "o")
    assert said in refused("eval", folder, "--seqlen", 64)
    assert said in refused("inspect", folder)
    assert said in refused("verify", folder, status=1)
    assert said in refused("simulate", chain.image, "--decode", 4, "--functional", "--reference", folder)


def test_a_newer_quantization_report(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    folder = copy_of(chain.quantized)
    edit_json(folder / "quantization_report.json", schema_version=99)
    said = "quantization_report.json: written by a newer version of oasis"
    assert said in refused("inspect", folder)
    assert said in refused("verify", folder, status=1)
    args = ("quantize", chain.model, "--calibration", chain.calibration, "--resume")
    assert said in refused(*args, "--out", folder)


def test_a_newer_image(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    """The version is the 32-bit number after the eight bytes of the magic (docs/image-format.md)."""
    folder = copy_of(chain.image)
    data = bytearray((folder / "model.oimg").read_bytes())
    assert struct.unpack_from("<I", data, 8) == (1,)
    struct.pack_into("<I", data, 8, 99)
    (folder / "model.oimg").write_bytes(data)
    for args in (("simulate", folder, "--decode", 4), ("eval", folder, "--seqlen", 64), ("inspect", folder)):
        assert "version 99" in refused(*args)
    assert "version 99" in refused("verify", folder, status=1)


def test_a_newer_map_of_an_image(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    folder = copy_of(chain.image)
    edit_json(folder / "image.json", schema_version=99)
    assert "image.json: written by a newer version of oasis" in refused("verify", folder, status=1)


def test_a_calibration_of_another_model(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    """One number of the configuration is enough to be another model."""
    model = copy_of(chain.model)
    edit_json(model / "config.json", rms_norm_eps=1e-4)
    line = refused("quantize", model, "--calibration", chain.calibration, "--out", "new/o")
    assert f"{chain.calibration}: made for another model ({chain.model.name}), not for {model.name}" in line
    assert "run oasis calibrate on this one" in line


def test_a_calibration_with_other_outliers(refused: Refused, chain: Chain) -> None:
    args = ("quantize", chain.model, "--calibration", chain.calibration, "--out", "new/o", "--outliers", 0.01)
    assert "calibrated with outliers 0.005, not 0.01; run oasis calibrate with --outliers 0.01" in refused(*args)


@pytest.mark.parametrize("name", ["calibration.json", "calibration.safetensors"])
def test_a_damaged_calibration(refused: Refused, chain: Chain, copy_of: Copy, name: str) -> None:
    folder = copy_of(chain.calibration)
    whole = (folder / name).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", bytes(flipped)):
        (folder / name).write_bytes(damaged)
        line = refused("quantize", chain.model, "--calibration", folder, "--out", "new/o")
        assert f"{folder / name}: " in line
        assert "damaged" in line
    (folder / name).unlink()
    assert f"{folder / name}: not found" in refused("quantize", chain.model, "--calibration", folder, "--out", "o")


def test_what_is_no_calibration(refused: Refused, chain: Chain) -> None:
    args = ("quantize", chain.model, "--out", "o", "--calibration")
    assert "missing: not a folder; run oasis calibrate first and name its --out" in refused(*args, "missing")
    assert "calibration.json: not found" in refused(*args, chain.quantized)


def test_what_is_no_quantized_folder(refused: Refused, chain: Chain) -> None:
    assert "the model is not quantized; run oasis quantize on it first" in refused(
        "compile", chain.model, "--out", "new/o"
    )
    assert "missing: not a folder" in refused("compile", "missing", "--out", "new/o")
    assert "no config.json" in refused("compile", chain.calibration, "--out", "new/o")
    assert "no weights" in refused("compile", chain.image, "--out", "new/o")


def test_a_quantized_folder_that_is_damaged(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    folder = copy_of(chain.quantized)
    shard = folder / "model-00002-of-00005.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    for args in (("compile", folder, "--out", "o"), ("eval", folder, "--seqlen", 64), ("inspect", folder)):
        assert f"{shard}: truncated" in refused(*args)
    shard.unlink()
    for args in (("compile", folder, "--out", "o"), ("eval", folder, "--seqlen", 64), ("inspect", folder)):
        assert f"names {shard.name}, which is absent" in refused(*args)


def test_what_is_no_image(refused: Refused, chain: Chain) -> None:
    assert "missing/model.oimg: not found; run oasis compile to write it" in refused("simulate", "missing")
    assert "model.oimg: not found; run oasis compile to write it" in refused("simulate", chain.quantized)


def test_an_image_that_is_damaged_is_not_simulated(refused: Refused, chain: Chain, copy_of: Copy) -> None:
    folder = copy_of(chain.image)
    data = bytearray((folder / "model.oimg").read_bytes())
    data[len(data) // 2] ^= 4
    (folder / "model.oimg").write_bytes(data)
    for args in (("simulate", folder, "--decode", 4), ("eval", folder, "--seqlen", 64)):
        assert "is damaged (checksum); run oasis compile again" in refused(*args)
    (folder / "model.oimg").write_bytes(data[:-4096])
    for args in (("simulate", folder, "--decode", 4), ("eval", folder, "--seqlen", 64), ("inspect", folder)):
        assert "truncated" in refused(*args)


def test_a_reference_of_another_image(
    refused: Refused, chain: Chain, one_block: Path, done: Callable[..., object]
) -> None:
    done("calibrate", one_block, "--samples", 1, "--seqlen", 64, "--out", "calibration")
    done("quantize", one_block, "--calibration", "calibration", "--out", "other")
    args = ("simulate", chain.image, "--decode", 4, "--functional", "--seqlen", 16, "--reference")
    assert "name the folder that it was compiled from with --reference" in refused(*args, "other")
    assert "the model is not quantized" in refused(*args, chain.model)
    assert "missing: not a folder" in refused(*args, "missing")


def test_the_seal_of_a_manifest_is_its_own(workspace: Path, chain: Chain, copy_of: Copy, refused: Refused) -> None:
    """A manifest that somebody wrote anew, seal and all, is judged by what it says."""
    folder = copy_of(chain.calibration)
    manifest = json.loads((folder / "calibration.json").read_text())
    del manifest["manifest_digest"], manifest["sites"]
    write_sealed(folder / "calibration.json", manifest)
    assert "damaged" in refused("quantize", chain.model, "--calibration", folder, "--out", "o")
