"""The quantize stage: model and calibration in, a Hugging Face folder out."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import is_finished, output_directory
from oasis_cli.formats.calibration import Calibration, read_calibration
from oasis_cli.formats.manifest import (
    digest_bytes,
    manifest,
    read_sealed,
    refuse_other_run,
)
from oasis_cli.formats.packing import pack_indices
from oasis_cli.formats.quantized import KIND, REPORT_NAME, SCHEMA_VERSION, LayerSpec, QuantizationSpec
from oasis_cli.models.checkpoint import Checkpoint
from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.gemm import QuantizedWeight
from oasis_cli.paths import user_path
from oasis_cli.progress import SILENT, Progress
from oasis_cli.quantization.folder import BlockFiles, block_of, finish_folder, with_sizes
from oasis_cli.quantization.methods import Job, QuantizedLayer, quantizer_of
from oasis_cli.quantization.settings import QuantizationSettings
from oasis_cli.quantization.tuning import Tuned, tune

_TUNED_NAME = ".tuned.safetensors"


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
        tuning: steps, divergence from the original before and after, seconds; None without tuning.
        seconds: wall time; 0 where the artifact was there already.
    """

    folder: Path
    layers: int
    relative_error: float
    bytes_before: int
    bytes_after: int
    bytes_other: int
    model_digest: str
    tuning: Mapping[str, Any] | None = None
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
            tuning=report["tuning"],
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

    Embeddings, biases and the output head stay as they are, in their own dtype, and but for tuning so do norms; ties
    are kept.

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
        InputError: calibration of another model or with other outliers, weights that are not finite, `out` occupied,
            tuning that diverges.
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
        run = digest_bytes(json.dumps(block, sort_keys=True).encode())
        job = Job(model, spec, calibration, options)
        files = BlockFiles(folder, model, spec, run)
        _quantize_blocks(job, files, progress)
        tuning = _tune(job, files, folder / _TUNED_NAME, run, progress) if options.tunes else None
        report = block | {"model": checkpoint.name, "tuning": tuning} | files.summarise()
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
    return QuantizationSpec(
        method=options.method,
        weight_bits=options.weight_bits,
        act_bits=options.act_bits,
        outlier_fraction=fraction,
        outlier_mode=options.outlier_mode if fraction > 0 else "none",
        scale_kind=options.scale_kind if options.refits else calibration.recipe["scale_kind"],
        codebook_grid=options.codebook_grid,
        layers=layers,
    )


def _quantize_blocks(job: Job, files: BlockFiles, progress: Progress) -> None:
    """Every block's files, those excepted that an interrupted run finished."""
    quantizer = quantizer_of(job)
    with progress.task("quantizing", len(job.spec.layers), "layers") as task:
        for number, layers in files.blocks():
            if files.take_up(number):
                if layers:
                    quantizer.take_over(block_of(number), partial(files.read_layers, number))
            else:
                found = quantizer.quantize(block_of(number), layers) if layers else iter(())
                files.write_block(number, {name: _to_disk(name, job, layer) for name, layer in found})
            task.advance(len(layers))


def _tune(job: Job, files: BlockFiles, kept: Path, run: str, progress: Progress) -> Mapping[str, Any]:
    """Tune the finished files; what was found is written down first, so that no interruption mixes old and new."""
    tuned = Tuned.load(kept, run)
    if tuned is None:
        layers = {name: layer for number, _ in files.blocks() for name, layer in files.read_layers(number).items()}
        tuned = tune(job, layers, progress)
        tuned.save(kept, run)
    for number, _ in files.blocks():
        files.replace(number, tuned.tensors)
    kept.unlink()
    return tuned.report


def _to_disk(name: str, job: Job, layer: QuantizedLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    thresholds = job.calibration.sites[job.spec.layers[name].site].thresholds
    tensors = layer_tensors(name, job.spec, layer.weight, layer.site.codebook, thresholds)
    return tensors, layer.report.to_json() | {"site_grid_cost": layer.site.grid_cost}


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
