"""Is a damaged weight file found before anything is loaded from it?"""

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from oasis_cli.errors import InputError
from oasis_cli.models.safetensors_files import DeclaredTensor, find_weight_files, read_header

Refusal = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.float16), "none": torch.zeros(0, 4)}, path)
    return path


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def test_header_lists_what_was_saved(file: Path) -> None:
    assert read_header(file) == {
        "a": DeclaredTensor("F32", (3, 5)),
        "b": DeclaredTensor("F16", (7,)),
        "none": DeclaredTensor("F32", (0, 4)),
    }


@pytest.mark.parametrize("size", [0, 5, 8, 40, -20, -1])
def test_truncation_says_the_bytes(file: Path, refusal: Refusal, size: int) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    message = refusal(read_header, file)
    assert "truncated" in message
    assert f"{len(whole[:size]):,}" in message
    if size < 0:
        assert (
            message == f"{file}: truncated ({len(whole) + size:,} of {len(whole):,} bytes); download or write it again"
        )


@given(position=st.integers(0, 10**6), byte=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_changed_byte_escapes_as_another_error(file: Path, position: int, byte: int) -> None:
    data = bytearray(file.read_bytes())
    data[position % len(data)] = byte
    damaged = file.with_name("damaged.safetensors")
    damaged.write_bytes(data)
    with suppress(InputError):  # any other error fails the test
        read_header(damaged)


def test_trailing_bytes_are_refused(file: Path, refusal: Refusal) -> None:
    file.write_bytes(file.read_bytes() + b"more")
    assert "its header accounts for" in refusal(read_header, file)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (b"{", "its header is not JSON"),
        (b"[]", "its header is no table"),
        (b"[" * 100_000, "its header is not JSON"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "entry of a contradicts itself"),
        ({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "entry of a contradicts itself"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "entry of a contradicts itself"),
        ({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, "entry of a contradicts itself"),
        ({"a": 1}, "entry of a contradicts itself"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, "a begins at byte 1 of the data, 0 expected"),
        (
            {
                "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
            },
            "b begins at byte 1 of the data, 2 expected",
        ),
    ],
)
def test_header_that_lies_is_refused(tmp_path: Path, refusal: Refusal, header: Any, complaint: str) -> None:
    assert complaint in refusal(read_header, write(tmp_path / "x.safetensors", header, b"1234"))


def test_header_longer_than_the_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "damaged or truncated (10 bytes, header of 1,152,921,504,606,846,976)" in refusal(read_header, path)


def test_shards_are_found_by_their_index(sharded_folder: Path) -> None:
    files = find_weight_files(sharded_folder)
    assert len(files) > 2
    assert all(file.name.startswith("model-0000") for file in files)


def test_absent_shard(sharded_folder: Path, refusal: Refusal) -> None:
    gone = find_weight_files(sharded_folder)[1]
    gone.unlink()
    assert f"names {gone.name}, which is absent" in refusal(find_weight_files, sharded_folder)


@pytest.fixture
def edit_map(sharded_folder: Path) -> Callable[[Callable[[dict[str, Any]], Any]], None]:
    def edit(change: Callable[[dict[str, Any]], Any]) -> None:
        path = sharded_folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return edit


def test_index_that_names_an_absent_tensor(sharded_folder: Path, refusal: Refusal, edit_map: Any) -> None:
    edit_map(lambda names: names.update(ghost=names["model.norm.weight"]))
    assert "holds ghost, it does not" in refusal(find_weight_files, sharded_folder)


def test_stale_index_that_leaves_a_tensor_out(sharded_folder: Path, refusal: Refusal, edit_map: Any) -> None:
    edit_map(lambda names: names.pop("model.norm.weight"))
    assert "also holds model.norm.weight" in refusal(find_weight_files, sharded_folder)


def test_tensor_in_two_shards(sharded_folder: Path, refusal: Refusal, edit_map: Any) -> None:
    save_file({"model.norm.weight": torch.zeros(16)}, sharded_folder / "again.safetensors")
    edit_map(lambda names: names.update({"model.norm.weight": "again.safetensors"}))
    assert "which again.safetensors holds too" in refusal(find_weight_files, sharded_folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 7, "weights.bin"])
def test_index_cannot_lead_elsewhere(sharded_folder: Path, refusal: Refusal, edit_map: Any, name: Any) -> None:
    edit_map(lambda names: names.update({"model.norm.weight": name}))
    assert "is not the name of a safetensors file beside it" in refusal(find_weight_files, sharded_folder)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_index_without_a_map(sharded_folder: Path, refusal: Refusal, text: str) -> None:
    (sharded_folder / "model.safetensors.index.json").write_text(text)
    assert "has no weight_map" in refusal(find_weight_files, sharded_folder)


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ((), "no weights; a model folder holds model.safetensors"),
        (("pytorch_model.bin",), "only pickle weights (pytorch_model.bin), which may run code when loaded"),
        (("consolidated.00.pth",), "convert to safetensors"),
        (("model-00001-of-00002.safetensors",), "model-00001-of-00002.safetensors lacks its index"),
    ],
)
def test_folder_without_usable_weights(
    tmp_path: Path, refusal: Refusal, names: tuple[str, ...], complaint: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert complaint in refusal(find_weight_files, tmp_path)
