"""What a safetensors file declares, checked against what it holds before anything is loaded."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oasis_cli.errors import InputError
from oasis_cli.formats.manifest import read_json

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_ITEM_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class DeclaredTensor:
    """A tensor as a file's header declares it."""

    dtype: str
    shape: tuple[int, ...]


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a Hugging Face folder, each checked, and their index where there are several.

    Raises:
        InputError: no safetensors weights, or a file or the index is damaged or does not fit the others.
    """
    if (folder / SINGLE_FILE).is_file():
        read_header(folder / SINGLE_FILE)
        return (folder / SINGLE_FILE,)
    if (folder / INDEX_FILE).is_file():
        return _read_shards(folder / INDEX_FILE)
    raise InputError(_explain_absence(folder))


def _explain_absence(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in names:
        if name.endswith(".safetensors"):
            return f"{folder}: {name} lacks its index; the weights must be {SINGLE_FILE}, or shards with {INDEX_FILE}"
    for name in names:
        if name.endswith(PICKLE_SUFFIXES):
            return f"{folder}: only pickle weights ({name}), which may run code when loaded; convert to safetensors"
    return f"{folder}: no weights; a model folder holds {SINGLE_FILE}, or shards with {INDEX_FILE}"


def _read_shards(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: damaged, has no weight_map; download or write the model again")
    owner: dict[str, str] = {}
    names = sorted({_plain_name(index, name) for name in weight_map.values()})
    for name in names:
        shard = index.parent / name
        if not shard.is_file():
            raise InputError(f"{index}: names {name}, which is absent; download or write the model again")
        for tensor in read_header(shard):
            if tensor in owner:
                raise InputError(f"{shard}: holds {tensor}, which {owner[tensor]} holds too; write the model again")
            owner[tensor] = name
    _compare_index(index, weight_map, owner)
    return tuple(index.parent / name for name in names)


def _plain_name(index: Path, name: object) -> str:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise InputError(f"{index}: damaged, {name!r} is not the name of a safetensors file beside it; {_CURE}")
    return name


def _compare_index(index: Path, weight_map: Mapping[str, str], owner: Mapping[str, str]) -> None:
    for tensor, name in weight_map.items():
        if owner.get(tensor) != name:
            raise InputError(
                f"{index}: says that {name} holds {tensor}, it does not; download or write the model again"
            )
    if extra := sorted(owner.keys() - weight_map.keys()):
        raise InputError(f"{index}: stale, {owner[extra[0]]} also holds {extra[0]}; download or write the model again")


def read_header(path: Path) -> dict[str, DeclaredTensor]:
    """Every tensor that a safetensors file declares.

    The data must lie as the header says: in the file, without gaps or overlaps, each as long as its shape needs.

    Raises:
        InputError: the file cannot be read, is truncated or too long, or its header is damaged.
    """
    size, header, data_start = _read_json_header(path)
    tensors: dict[str, DeclaredTensor] = {}
    extents: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name], begin, end = _parse_entry(path, name, entry)
        extents.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(extents):
        if begin != position:
            raise _damaged(path, f"{name} begins at byte {begin:,} of the data, {position:,} expected")
        position = end
    _check_size(path, size, data_start + position)
    return tensors


def _read_json_header(path: Path) -> tuple[int, dict[str, Any], int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise InputError(f"{path}: truncated ({size:,} bytes, a header alone has more); {_CURE}")
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise InputError(f"{path}: damaged or truncated ({size:,} bytes, header of {length:,}); {_CURE}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, RecursionError):
        raise _damaged(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no table")
    return size, header, 8 + length


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[DeclaredTensor, int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        sound = sound and end - begin == math.prod(shape) * _ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise _damaged(path, f"the header's entry of {name} contradicts itself or has an unknown dtype")
    return DeclaredTensor(dtype, shape), begin, end


def _check_size(path: Path, size: int, declared: int) -> None:
    if size < declared:
        raise InputError(f"{path}: truncated ({size:,} of {declared:,} bytes); {_CURE}")
    if size > declared:
        raise _damaged(path, f"{size:,} bytes, its header accounts for {declared:,}")


_CURE: Final = "download or write it again"


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path}: damaged, {what}; {_CURE}")
