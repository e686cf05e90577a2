"""The quantize stage: model and calibration in, a Hugging Face folder out."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as settings
from torch import Tensor
from transformers import PreTrainedModel

from oasis_cli.config import STRICT
from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import is_finished, output_directory
from oasis_cli.formats.calibration import Calibration, SiteCalibration, read_calibration
from oasis_cli.formats.manifest import (
    digest_bytes,
    manifest,
    read_sealed,
    refuse_other_run,
)
from oasis_cli.formats.packing import pack_indices
from oasis_cli.formats.quantized import KIND, REPORT_NAME, SCHEMA_VERSION, LayerSpec, OutlierMode, QuantizationSpec
from oasis_cli.models.checkpoint import Checkpoint
from oasis_cli.numerics.codebook import Codebook, CodebookGrid
from oasis_cli.numerics.gemm import QuantizedWeight
from oasis_cli.numerics.grid import to_grid
from oasis_cli.numerics.kmeans import Line
from oasis_cli.paths import user_path
from oasis_cli.progress import SILENT, Progress
from oasis_cli.quantization.folder import BlockFiles, finish_folder, with_sizes
from oasis_cli.quantization.kmeans_weights import WeightReport, quantize_weight

Method = Literal["oasis", "oasis-s"]
METHODS: Final[Mapping[Method, OutlierMode]] = {"oasis": "dynamic", "oasis-s": "static"}
"""The paper's two methods; they differ in how outliers are found when the model runs (§V-A)."""


@settings(frozen=True, config=STRICT)
class QuantizationSettings:
    """How to quantize.

    Attributes:
        method: `oasis` (dynamic outliers) or `oasis-s` (static thresholds).
        weight_bits: bits of a weight index, n_W.
        act_bits: bits of an activation index, n_A.
        outlier_fraction: outliers a side; None takes the calibration's, and no other than that is possible.
        codebook_grid: `int8` makes LUT entries and their sums exact integers; `fp16` rounds centroids and LUT entries
            to float16.
        seed: of K-Means over the weights.
    """

    method: Method = "oasis"
    weight_bits: int = Field(default=4, ge=1, le=4)
    act_bits: int = Field(default=4, ge=1, le=4)
    outlier_fraction: float | None = Field(default=None, ge=0, le=0.5)
    codebook_grid: CodebookGrid = "int8"
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class QuantizationResult:
    """What the stage did.

    Attributes:
        folder: the artifact.
        layers: quantized layers.
        relative_error: weights' squared error over their squares, all layers together.
        bytes_before: the quantized layers at 16 bits.
        bytes_after: the same layers as they are stored now.
        bytes_other: everything that was left as it is.
        model_digest: digest of the model.
        seconds: wall time; 0 where the artifact was there already.
    """

    folder: Path
    layers: int
    relative_error: float
    bytes_before: int
    bytes_after: int
    bytes_other: int
    model_digest: str
    seconds: float = 0.0

    @classmethod
    def from_report(cls, folder: Path, report: Mapping[str, Any], seconds: float = 0.0) -> "QuantizationResult":
        """The result that a finished folder stands for."""
        totals = report["totals"]
        return cls(
            folder=folder,
            layers=len(report["layers"]),
            relative_error=totals["relative_error"],
            bytes_before=totals["bytes_before"],
            bytes_after=totals["bytes_after"],
            bytes_other=totals["bytes_other"],
            model_digest=report["created_from"]["model"],
            seconds=seconds,
        )


def quantize(
    checkpoint: Checkpoint,
    out: str | Path,
    calibration_folder: str | Path,
    options: QuantizationSettings,
    *,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> QuantizationResult:
    """Quantize every linear layer of the decoder blocks.

    Embeddings, norms, biases and the output head stay as they are, in their own dtype; ties are kept.

    Args:
        checkpoint: the model, unquantized.
        out: folder for the artifact.
        calibration_folder: of this very model.
        options: method, bits, outliers.
        device: where weights are binned and their indices found; K-Means itself runs on the CPU.
        resume: go on from the blocks that an interrupted run finished; a finished folder is left as it is.
        overwrite: replace an earlier quantized model at `out`.
        progress: who is told.

    Raises:
        InputError: calibration of another model or with other outliers, weights that are not finite, `out` occupied.
    """
    started, out, calibration_folder = time.monotonic(), user_path(out), user_path(calibration_folder)
    calibration = read_calibration(calibration_folder)
    spec = _specify(checkpoint, calibration, calibration_folder, options)
    origin = {"model": checkpoint.digest, "calibration": calibration.digest}
    block = manifest(KIND, SCHEMA_VERSION, origin, asdict(options) | {"outlier_fraction": spec.outlier_fraction})
    if resume and is_finished(out, REPORT_NAME):
        existing = read_sealed(out / REPORT_NAME, KIND, SCHEMA_VERSION)
        refuse_other_run(out, existing, block)
        return QuantizationResult.from_report(out, existing)
    with output_directory(out, REPORT_NAME, overwrite=overwrite, resumable=True, resume=resume) as folder:
        model = checkpoint.load_model(dtype=checkpoint.dtype, device=device)
        spec = replace(spec, layers=with_sizes(spec, model, calibration_folder))
        sites = {name: _quantize_site(name, site, spec) for name, site in calibration.sites.items()}
        files = BlockFiles(folder, model, spec, run=digest_bytes(json.dumps(block, sort_keys=True).encode()))
        with progress.task("quantizing", len(spec.layers), "layers") as task:
            for number, layers in files.blocks():
                if not files.take_up(number):
                    files.write_block(number, dict(_quantize_layers(model, layers, spec, sites, options)))
                task.advance(len(layers))
        costs = {name: {"grid_cost": site.grid_cost} for name, site in sites.items()}
        report = block | {"model": checkpoint.name, "sites": costs} | files.summarise()
        finish_folder(folder, checkpoint, spec, report)
    return QuantizationResult.from_report(out, report, time.monotonic() - started)


def _specify(
    checkpoint: Checkpoint, calibration: Calibration, folder: Path, options: QuantizationSettings
) -> QuantizationSpec:
    """The specification of the folder to be, once calibration and model are known to belong together."""
    if checkpoint.quantization:
        raise InputError(f"{checkpoint.path}: already quantized ({checkpoint.quantization}); name the original model")
    if calibration.model_digest != checkpoint.digest:
        raise InputError(
            f"{folder}: made for another model ({calibration.manifest.get('model')}), not for {checkpoint.name}; "
            "run oasis calibrate on this one"
        )
    fraction = float(calibration.recipe["outlier_fraction"])
    if options.outlier_fraction not in (None, fraction):
        raise InputError(
            f"{folder}: calibrated with outliers {fraction}, not {options.outlier_fraction}; "
            f"run oasis calibrate with --outliers {options.outlier_fraction}"
        )
    layers = {layer: LayerSpec(name, site.K, 0) for name, site in calibration.sites.items() for layer in site.layers}
    mode = METHODS[options.method]
    return QuantizationSpec(
        method=options.method,
        weight_bits=options.weight_bits,
        act_bits=options.act_bits,
        outlier_fraction=fraction,
        outlier_mode=mode if fraction > 0 else "none",
        scale_kind=calibration.recipe["scale_kind"],
        codebook_grid=options.codebook_grid,
        layers=layers,
    )


@dataclass(frozen=True)
class _SiteFormat:
    """A site's activation codebook on its grid, its static thresholds, and what the grid cost it in error."""

    codebook: Codebook
    thresholds: Tensor
    grid_cost: float


def _quantize_site(name: str, site: SiteCalibration, spec: QuantizationSpec) -> _SiteFormat:
    line, centroids = Line(site.points), site.centroids[spec.act_bits].double().numpy()
    codebook = to_grid(line, centroids, spec.codebook_grid, f"site {name}")
    best = line.error(centroids)
    cost = line.error(codebook.centroids.double().numpy()) / best - 1 if best > 0 else 0.0
    return _SiteFormat(codebook, site.thresholds, cost)


def _quantize_layers(
    model: PreTrainedModel,
    layers: tuple[str, ...],
    spec: QuantizationSpec,
    sites: Mapping[str, _SiteFormat],
    options: QuantizationSettings,
) -> Iterator[tuple[str, tuple[dict[str, Tensor], WeightReport]]]:
    """Each layer's tensors and report."""
    for name in layers:
        weight = model.get_submodule(name).weight
        quantized, report = quantize_weight(
            weight.detach(), spec.weight_bits, spec.codebook_grid, f"{name}.weight", options.seed
        )
        site = sites[spec.layers[name].site]
        yield name, (layer_tensors(name, spec, quantized, site.codebook, site.thresholds), report)


def layer_tensors(
    name: str, spec: QuantizationSpec, weight: QuantizedWeight, act_codebook: Codebook, thresholds: Tensor
) -> dict[str, Tensor]:
    """A layer's tensors under the names they have on disk, as `declare_layer` promises them; its bias goes apart.

    Args:
        name: the layer.
        spec: of the folder.
        weight: N output channels of K.
        act_codebook: the site's.
        thresholds: the site's lower and upper, [2]; stored only where outliers are static.
    """
    tensors = {
        f"{name}.weight": pack_indices(weight.index),
        f"{name}.weight_codebook": weight.codebook.centroids,
        f"{name}.weight_scale": weight.scale,
        f"{name}.act_codebook": act_codebook.centroids.clone(),  # safetensors stores no tensor twice
        f"{name}.codebook_steps": torch.tensor([weight.codebook.step, act_codebook.step], dtype=torch.float32),
    }
    if spec.outlier_mode == "static":
        tensors[f"{name}.act_thresholds"] = thresholds.float().clone()
    return tensors
