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
    read_sealed,
    refuse_other_run,
    write_json,
    write_sealed,
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
    with pytest.raises(InputError, match="samples=4 instead of 8;"):
        refuse_other_run(Path("out"), before, manifest("calibration", 1, {"model": "a"}, {"samples": 8, "seed": 0}))
    with pytest.raises(InputError, match="another model;"):
        refuse_other_run(Path("out"), before, manifest("calibration", 1, {"model": "b"}, {"samples": 4, "seed": 0}))


def test_a_sealed_manifest_is_read_back_without_its_seal(tmp_path: Path) -> None:
    block = manifest("calibration", 1, {"model": "a"}, {"name": "naïve \udcff", "share": 0.1})
    write_sealed(tmp_path / "m", block)
    assert read_sealed(tmp_path / "m", "calibration", 1) == block
    assert (tmp_path / "m").read_bytes().isascii()


def test_a_seal_notices_every_bit(tmp_path: Path) -> None:
    """0.30000000000000004 and …05 are the same number, but not the same text."""
    path = tmp_path / "m"
    write_sealed(path, manifest("calibration", 1, {}, {"x": 0.1 + 0.2}))
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(InputError):
                read_sealed(path, "calibration", 1)
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError):
            read_sealed(path, "calibration", 1)


def test_a_manifest_without_a_seal_or_newer_is_no_sealed_one(tmp_path: Path) -> None:
    write_json(tmp_path / "m", manifest("calibration", 1, {}, {}))
    with pytest.raises(InputError, match="damaged, it is not what oasis wrote"):
        read_sealed(tmp_path / "m", "calibration", 1)
    write_sealed(tmp_path / "m", manifest("calibration", 2, {}, {}))
    with pytest.raises(InputError, match="newer version of oasis"):
        read_sealed(tmp_path / "m", "calibration", 1)
