"""What a quantized folder's files declare against what its specification asks for: headers only, no tensor is read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from oasis_cli.formats.quantized import QuantizationSpec, declare_layer
from oasis_cli.models.safetensors_files import DeclaredTensor, read_header

_NAMES: Final = {torch.uint8: "U8", torch.float16: "F16", torch.float32: "F32"}


def compare_layers(
    files: Sequence[Path], spec: QuantizationSpec, biases: Mapping[str, bool] | None = None
) -> list[str]:
    """Compare every quantized layer's tensors with the headers.

    Args:
        files: the folder's weight files.
        spec: its specification.
        biases: whether a layer has a bias, by name; without it, biases are not looked at.

    Returns:
        One line a tensor that is absent, or of another dtype or shape.

    Raises:
        InputError: a file is truncated or its header damaged.
    """
    declared = {name: (file, tensor) for file in files for name, tensor in read_header(file).items()}
    where = files[0].parent if files else Path("model")
    problems = []
    for layer in spec.layers:
        for name, (shape, dtype) in declare_layer(layer, spec).items():
            problems += _compare(where, declared, name, DeclaredTensor(_NAMES[dtype], shape))
        bias = f"{layer}.bias"
        if biases is not None and biases[layer] and bias not in declared:
            problems.append(f"{where}: lacks {bias}; {_CURE}")
    return problems


def compare_shapes(files: Sequence[Path], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Compare whatever the model has a place for with the headers; transformers does not always.

    Args:
        files: the folder's weight files.
        shapes: of the model's tensors, by name.

    Returns:
        One line a tensor of another shape.

    Raises:
        InputError: a file is truncated or its header damaged.
    """
    return [
        f"{file}: {name} has shape {list(tensor.shape)}, the configuration asks for {list(shapes[name])}; {_CURE}"
        for file in files
        for name, tensor in read_header(file).items()
        if name in shapes and tensor.shape != tuple(shapes[name])
    ]


def _compare(
    where: Path, declared: Mapping[str, tuple[Path, DeclaredTensor]], name: str, due: DeclaredTensor
) -> list[str]:
    if name not in declared:
        return [f"{where}: lacks {name}; {_CURE}"]
    file, found = declared[name]
    if found == due:
        return []
    return [f"{file}: {name} is {found.dtype} {list(found.shape)}, {due.dtype} {list(due.shape)} is due; {_CURE}"]


_CURE: Final = "run oasis quantize again"
