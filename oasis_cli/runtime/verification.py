"""Checking a quantized folder: that it is what was written, and that what was written makes sense."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor

from oasis_cli.errors import CheckError, InputError
from oasis_cli.formats.baseline import BASELINE_KIND, BASELINE_SCHEMA_VERSION
from oasis_cli.formats.manifest import digest_file, read_json, read_sealed
from oasis_cli.formats.packing import unpack_indices
from oasis_cli.formats.quantized import (
    KIND,
    QUANT_METHOD,
    REPORT_NAME,
    SCHEMA_VERSION,
    LayerSpec,
    QuantizationSpec,
    declare_layer,
)
from oasis_cli.models.checkpoint import Checkpoint, all_finite
from oasis_cli.numerics.codebook import grid_integers
from oasis_cli.progress import SILENT, Progress
from oasis_cli.runtime.declared import compare_layers
from oasis_cli.runtime.loading import load, open_baseline, open_quantized

_CURE: Final = "run oasis quantize again"


def verify_quantized(folder: str | Path, progress: Progress = SILENT) -> list[str]:
    """Check a quantized folder, from its files' digests to the values of its tensors.

    Args:
        folder: what `oasis quantize` wrote.
        progress: told about every tensor.

    Returns:
        What was checked, one line each.

    Raises:
        InputError: nothing there that oasis quantized.
        CheckError: any damage; the message names the first, and how many more there are.
    """
    path = Path(folder).expanduser()
    if not _is_ours(path):
        raise InputError(f"{path}: no folder that oasis quantize wrote; name one")
    try:
        checkpoint, spec = open_quantized(path)
        problems = [*_check_digests(path), *compare_layers(checkpoint.weight_files, spec)]
        if not problems:  # values are looked at only where every tensor is as it should be
            problems = list(_check_values(checkpoint, spec, progress))
    except InputError as error:
        raise CheckError(str(error)) from error
    _refuse(problems)
    return [
        f"files: sizes, headers and every SHA-256 that {REPORT_NAME} lists",
        f"tensors: all finite, {len(spec.layers)} quantized layers whole",
        "codebooks: ascending, on their grid, the same for all layers of a site",
    ]


def _is_ours(folder: Path) -> bool:
    if (folder / REPORT_NAME).is_file():
        return True
    if not (folder / "config.json").is_file():
        return False
    block = read_json(folder / "config.json").get("quantization_config")
    return isinstance(block, dict) and block.get("quant_method") == QUANT_METHOD


def _refuse(problems: Sequence[str]) -> None:
    """Raise the first problem, if there is one, and say how many more there are."""
    if problems:
        raise CheckError(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))


def verify_baseline(folder: str | Path, progress: Progress = SILENT) -> list[str]:
    """Check the folder of a method to compare with.

    Args:
        folder: what `oasis quantize` wrote.
        progress: told about every tensor.

    Returns:
        What was checked, one line each.

    Raises:
        InputError: nothing there that oasis quantized.
        CheckError: any damage.
    """
    checkpoint, spec = open_baseline(folder)
    _refuse(list(_check_digests(checkpoint.path, BASELINE_KIND, BASELINE_SCHEMA_VERSION)))
    tensors = load(folder).state_dict()
    with progress.task("checking tensors", len(tensors), "tensors") as task:
        for name, tensor in tensors.items():
            if not all_finite(tensor):
                raise CheckError(f"{checkpoint.path}: {name} holds NaN or infinity; {_CURE}")
            task.advance()
    return [
        f"files: every SHA-256 that {REPORT_NAME} lists",
        f"tensors: {len(tensors)}, all there and finite; {len(spec.layers)} layers of {spec.method}",
    ]


def _check_digests(folder: Path, kind: str = KIND, version: int = SCHEMA_VERSION) -> Iterator[str]:
    report = folder / REPORT_NAME
    if not report.is_file():
        yield f"{folder}: lacks {REPORT_NAME}, which has the digests of its files; {_CURE}"
        return
    files = read_sealed(report, kind, version).get("files")
    if not isinstance(files, dict) or not files:
        yield f"{report}: damaged, lists no files; {_CURE}"
        return
    for name, digest in sorted(files.items()):
        file = folder / name
        if Path(name).name != name or not file.is_file():
            yield f"{folder}: lacks {name}, which {REPORT_NAME} lists; {_CURE}"
        elif digest_file(file) != digest:
            yield f"{file}: was changed, its SHA-256 is not the one in {REPORT_NAME}; {_CURE}"


def _check_values(checkpoint: Checkpoint, spec: QuantizationSpec, progress: Progress) -> Iterator[str]:
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in checkpoint.weight_files]
        reader = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict
        with progress.task("checking tensors", len(reader), "tensors") as task:
            sites: dict[str, tuple[str, dict[str, Tensor]]] = {}
            for layer, sizes in spec.layers.items():
                tensors = {
                    name.rpartition(".")[2]: reader.pop(name).get_tensor(name) for name in declare_layer(layer, spec)
                }
                for problem in (*_check_layer(tensors, sizes, spec), *_check_site(layer, tensors, sizes, sites)):
                    yield f"{checkpoint.path}: {layer} {problem}; {_CURE}"
                task.advance(len(tensors))
            for name, file in reader.items():
                if not all_finite(file.get_tensor(name)):
                    yield f"{checkpoint.path}: {name} holds NaN or infinity; {_CURE}"
                task.advance()


def _check_layer(tensors: dict[str, Tensor], sizes: LayerSpec, spec: QuantizationSpec) -> Iterator[str]:
    """What is wrong with a layer's numbers taken by themselves."""
    weight = tensors["weight"]
    highest = int(unpack_indices(weight, sizes.in_features).max())
    if highest >= 1 << sizes.weight_bits:
        yield f"has a weight index of {highest}, beyond {sizes.weight_bits} bits"
    if sizes.in_features % 2 and bool((weight[:, -1] >> 4).any()):
        yield "has something in the padding after its last index"
    for name, tensor in tensors.items():
        if name != "weight" and not all_finite(tensor):
            yield f"has NaN or infinity in its {name}"
        elif name.endswith("_codebook") and bool((tensor.diff() < 0).any()):
            yield f"has a {name} that does not ascend"
    for name, step in zip(("weight_codebook", "act_codebook"), tensors["codebook_steps"].tolist(), strict=True):
        if name in tensors and not _is_on_grid(tensors[name], step, spec):
            yield f"has a {name} that is not on the {spec.codebook_grid} grid of step {step}"
    if "act_thresholds" in tensors and tensors["act_thresholds"].diff() < 0:
        yield "has thresholds that descend"


def _is_on_grid(codebook: Tensor, step: float, spec: QuantizationSpec) -> bool:
    if spec.codebook_grid == "fp16":
        return step == 0
    try:
        grid_integers(codebook, step)
    except ValueError:
        return False
    return True


def _check_site(
    layer: str, tensors: dict[str, Tensor], sizes: LayerSpec, sites: dict[str, tuple[str, dict[str, Tensor]]]
) -> Iterator[str]:
    """Layers of one site must say the same about its activations; `sites` remembers who spoke first."""
    own = {"step of activations": tensors["codebook_steps"][1], "K": torch.tensor(sizes.in_features)}
    own |= {name: tensors[name] for name in ("act_codebook", "act_thresholds") if name in tensors}
    first, others = sites.setdefault(sizes.site, (layer, own))
    for name, value in own.items():
        if not torch.equal(value, others[name]):
            yield f"has another {name} than {first}, which reads the same site"
