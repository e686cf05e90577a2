"""GGUF files: a header that is checked before use, and the weights under their transformers names, dequantized.

transformers reads GGUF too, but parses the header with its vocabulary for every call and builds its table of names once
a module, which takes half a minute for a small model. The numbers here are the same to the bit.
"""

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from oasis_cli.errors import InputError

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_CURE: Final = "download it again"


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies and how its values are stored; the shape is in torch's order."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    length: int


@dataclass(frozen=True)
class GgufHeader:
    """A file's metadata (arrays only as their length) and its tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """The family as GGUF names it."""
        return str(self.metadata["general.architecture"])


class _Cursor:
    """Walks the header; `struct.error` wherever the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def skip(self, length: int) -> None:
        self.position += length
        if self.position > len(self.data):
            raise struct.error("ends within a value")

    def string(self) -> str:
        (length,) = self.take("Q")
        start = self.position
        self.skip(length)
        return self.data[start : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array_length()
        return self.take(_SCALARS[kind])[0]

    def _array_length(self) -> int:
        kind, count = self.take("IQ")
        if kind == _STRING:
            for _ in range(count):
                self.skip(self.take("Q")[0])
        else:
            self.skip(count * struct.calcsize("<" + _SCALARS[kind]))
        return int(count)


def is_gguf(path: Path) -> bool:
    """Whether a file starts as GGUF files do."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the metadata and the tensor table, and check that every tensor lies within the file.

    Raises:
        InputError: not a GGUF file, of a version or tensor type not known, truncated or damaged.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[: len(MAGIC)] != MAGIC:
                raise InputError(f"{path}: not a GGUF file; name a GGUF file or a model folder")
            return _parse_header(path, _Cursor(data))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except (struct.error, KeyError, TypeError, ValueError, ArithmeticError):  # an empty file is mmap's ValueError
        raise InputError(
            f"{path}: truncated or damaged GGUF file ({path.stat().st_size:,} bytes, no sound header); {_CURE}"
        ) from None


def _parse_header(path: Path, cursor: _Cursor) -> GgufHeader:
    cursor.skip(len(MAGIC))
    version, tensor_count, entry_count = cursor.take("IQQ")
    if version not in _VERSIONS:
        raise InputError(f"{path}: GGUF version {version} is not supported, versions 2 and 3 are; convert it again")
    metadata = {}
    for _ in range(entry_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.take("I")[0])
    if "general.architecture" not in metadata:
        raise InputError(f"{path}: does not say its architecture; convert it again")
    table = [_take_table_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(_locate(path, *entry, data_start) for entry in table)
    _check_extent(path, tensors, len(cursor.data))
    return GgufHeader(path, metadata, tensors)


def _take_table_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (rank,) = cursor.take("I")
    shape = tuple(reversed(cursor.take(f"{rank}Q")))
    kind, offset = cursor.take("IQ")
    return name, shape, kind, offset


def _locate(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, data_start: int) -> GgufTensor:
    try:
        known = gguf.GGMLQuantizationType(kind)
        byte_shape = gguf.quant_shape_to_byte_shape(shape, known)
    except ValueError:
        raise InputError(
            f"{path}: {name} is of an unknown type or shape (GGML type {kind}); convert it again"
        ) from None
    return GgufTensor(name, shape, known, data_start + offset, int(np.prod(byte_shape, dtype=object)))


def _check_extent(path: Path, tensors: Sequence[GgufTensor], size: int) -> None:
    needed = max((tensor.start + tensor.length for tensor in tensors), default=0)
    if needed > size:
        raise InputError(f"{path}: truncated ({size:,} of {needed:,} bytes); {_CURE}")


def read_gguf_weights(
    header: GgufHeader, parameters: Sequence[str], config: PretrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """Dequantize the weights one by one.

    Args:
        header: of the file.
        parameters: names of the model's parameters, in transformers' spelling.
        config: of the model.

    Yields:
        A parameter's name and its float32 values.

    Raises:
        InputError: a tensor of the file has no place in the model, or its type cannot be dequantized.
    """
    names = _map_names(header, parameters, config)
    data = np.memmap(header.path, mode="r", dtype=np.uint8)
    for tensor in header.tensors:
        if tensor.name not in names:
            raise InputError(
                f"{header.path}: {tensor.name} has no place in a {config.model_type} model of transformers; "
                "use the model's safetensors folder"
            )
        yield names[tensor.name], _dequantize(header, tensor, data, config)


def _map_names(header: GgufHeader, parameters: Sequence[str], config: PretrainedConfig) -> dict[str, str]:
    """GGUF name -> transformers name."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    names = {}
    for parameter in parameters:
        stem, dot, kind = parameter.rpartition(".")
        if stem_in_file := table.get_name(stem):
            names[stem_in_file + dot + kind] = parameter
    return names


def _dequantize(header: GgufHeader, tensor: GgufTensor, data: np.ndarray, config: PretrainedConfig) -> Tensor:
    raw = data[tensor.start : tensor.start + tensor.length]
    rows = raw.reshape(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind))
    if tensor.kind == gguf.GGMLQuantizationType.F32:
        rows = raw.view(np.float32).reshape(tensor.shape)
    elif tensor.kind == gguf.GGMLQuantizationType.F16:
        rows = raw.view(np.float16).reshape(tensor.shape)
    try:
        values = torch.from_numpy(np.array(gguf.dequantize(rows, tensor.kind), dtype=np.float32))
    except NotImplementedError:
        raise InputError(
            f"{header.path}: {tensor.name} is {tensor.kind.name}, which cannot be dequantized; use another GGUF file"
        ) from None
    heads = _rotary_heads(header, tensor, config)
    return _pair_halves(values, heads) if heads else values


def _rotary_heads(header: GgufHeader, tensor: GgufTensor, config: PretrainedConfig) -> int:
    """Heads of a query or key projection whose rotary pairs GGUF keeps side by side: the llama family only."""
    if header.architecture != "llama":
        return 0
    if ".attn_q." in tensor.name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k." in tensor.name else 0


def _pair_halves(values: Tensor, heads: int) -> Tensor:
    """Rows of a head from pairs (0, 1), (2, 3), … to transformers' halves (0, 2, …), (1, 3, …)."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape).contiguous()
