"""The quantized folder as the compiler reads it: declared tensors first, then one tensor, or a few rows, at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from oasis_cli.errors import InputError
from oasis_cli.formats.manifest import digest_file
from oasis_cli.formats.quantized import QuantizationSpec
from oasis_cli.models.configuration import CONFIG_FILE, read_folder_config
from oasis_cli.models.safetensors_files import DeclaredTensor, find_weight_files, read_header

CURE: Final = "run oasis quantize again"
# one block of a large tensor; above it, rows are read in several steps
_BLOCK_BYTES: Final = 1 << 26
DTYPES: Final = {
    "U8": torch.uint8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


@dataclass
class QuantizedFolder:
    """A quantized model on disk, checked as far as headers tell.

    Attributes:
        path: the folder.
        config: transformers' configuration.
        spec: how it was quantized.
        weight_files: its safetensors files.
        untouched: names of the tensors that nothing has asked for yet.
    """

    path: Path
    config: PretrainedConfig
    spec: QuantizationSpec
    weight_files: tuple[Path, ...]
    _declared: dict[str, tuple[Path, DeclaredTensor]]
    untouched: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.untouched = set(self._declared)

    def __contains__(self, name: str) -> bool:
        return name in self._declared

    def where(self, name: str) -> str:
        """What a message about a tensor opens with."""
        return f"{self._declared[name][0]}: {name}"

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.dtype:
        """Make sure that a tensor is there as it must be.

        Args:
            name: the tensor.
            shape: the shape that it must have.
            dtype: the type that it must have; None for any of the float types.

        Returns:
            Its type.

        Raises:
            InputError: it is absent, or has another shape or type.
        """
        if name not in self._declared:
            raise InputError(f"{self.path}: the weights lack {name}; {CURE}")
        self.untouched.discard(name)
        declared = self._declared[name][1]
        found = DTYPES.get(declared.dtype)
        wrong = found is None or (found != dtype if dtype else not found.is_floating_point)
        if declared.shape != shape or found is None or wrong:
            due = f"{str(dtype or 'float').removeprefix('torch.')} {list(shape)}"
            raise InputError(f"{self.where(name)} is {declared.dtype} {list(declared.shape)}, {due} is due; {CURE}")
        return found

    def load(self, name: str) -> Tensor:
        """One whole tensor.

        Raises:
            InputError: it cannot be read, or holds a value that is not finite.
        """
        return torch.cat(list(self.rows(name)))

    def rows(self, name: str) -> Iterator[Tensor]:
        """A tensor in blocks of whole rows, so that a large one need not be in memory at once.

        Raises:
            InputError: it cannot be read, or holds a value that is not finite.
        """
        file, declared = self._declared[name]
        row_bytes = DTYPES[declared.dtype].itemsize * max(1, _product(declared.shape[1:]))
        step = max(1, _BLOCK_BYTES // row_bytes)
        try:
            with safe_open(file, framework="pt") as handle:
                view = handle.get_slice(name)
                for start in range(0, declared.shape[0], step):
                    yield self._finite(name, view[start : start + step])
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: cannot be read ({error}); {CURE}") from error

    def _finite(self, name: str, block: Tensor) -> Tensor:
        if block.is_floating_point() and not torch.stack(torch.aminmax(block)).isfinite().all():
            raise InputError(f"{self.where(name)} holds NaN or infinity; {CURE}")
        return block

    def digests(self) -> dict[str, str]:
        """SHA-256 of the configuration and of every weight file."""
        return {file.name: digest_file(file) for file in (self.path / CONFIG_FILE, *self.weight_files)}


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def open_quantized(path: Path) -> QuantizedFolder:
    """Open a quantized folder.

    Raises:
        InputError: it is none, is damaged, or was written by a newer version.
    """
    if not path.is_dir():
        raise InputError(f"{path}: not a folder; name the folder that oasis quantize wrote")
    config = read_folder_config(path)
    block: Any = getattr(config, "quantization_config", None)
    where = path / CONFIG_FILE
    if not isinstance(block, dict):
        raise InputError(f"{where}: the model is not quantized; run oasis quantize on it first")
    spec = QuantizationSpec.from_config(block, str(where))
    files = find_weight_files(path)
    declared = {name: (file, tensor) for file in files for name, tensor in read_header(file).items()}
    return QuantizedFolder(path, config, spec, files, declared)
