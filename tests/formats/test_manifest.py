from pathlib import Path

import pytest

from oasis_cli.errors import InputError
from oasis_cli.formats.manifest import (
    check_version,
    digest_bytes,
    digest_file,
    digest_of,
    manifest,
    read_json,
    read_manifest,
    refuse_other_run,
    write_json,
)

# SHA-256 of nothing and of "abc", as FIPS 180-4 prints them
EMPTY = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
ABC = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert digest_file(tmp_path / "f") == digest_bytes(b"abc") == ABC
    assert digest_bytes(b"") == EMPTY
    assert digest_of({"a": "1", "b": "2"}) == digest_of([("b", "2"), ("a", "1")]) != digest_of({"a": "2", "b": "1"})


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"x": 1, "y": [0.1]})
    write_json(tmp_path / "b", {"y": [0.1], "x": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(InputError, match="damaged") as error:
        read_json(tmp_path / "m")
    assert "\n" not in str(error.value)


def test_missing_and_foreign_and_newer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not found"):
        read_manifest(tmp_path / "m", "calibration", 1)
    write_json(tmp_path / "m", manifest("image", 1, {}, {}))
    with pytest.raises(InputError, match="is 'image', not a calibration"):
        read_manifest(tmp_path / "m", "calibration", 1)
    write_json(tmp_path / "m", manifest("calibration", 2, {}, {}))
    with pytest.raises(InputError, match="newer version of oasis"):
        read_manifest(tmp_path / "m", "calibration", 1)


@pytest.mark.parametrize("version", [None, "1", 0, True, 1.0])
def test_odd_versions_are_damage(version: object) -> None:
    with pytest.raises(InputError, match="damaged, schema_version"):
        check_version(version, 1, "m")


def test_another_run_is_named_by_what_differs() -> None:
    before = manifest("calibration", 1, {"model": "a"}, {"samples": 4, "seed": 0})
    refuse_other_run(Path("out"), before, before)
    with pytest.raises(InputError, match="another samples;"):
        refuse_other_run(Path("out"), before, manifest("calibration", 1, {"model": "a"}, {"samples": 8, "seed": 0}))
    with pytest.raises(InputError, match="another model;"):
        refuse_other_run(Path("out"), before, manifest("calibration", 1, {"model": "b"}, {"samples": 4, "seed": 0}))
