"""Safetensors files, written as atomically as any other."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from oasis_cli.formats.atomic import atomic_file


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors under their names.

    Raises:
        InputError: the system refused the write.
    """
    with atomic_file(path) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata) if metadata else None)
        except SafetensorError as error:  # a full disk, in the words of another language
            raise OSError(str(error)) from error
