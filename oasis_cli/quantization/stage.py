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
from transformers import PretrainedConfig

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
from oasis_cli.formats.quantized import KIND, REPORT_NAME, SCHEMA_VERSION, CacheSpec, LayerSpec, QuantizationSpec
from oasis_cli.models.checkpoint import Checkpoint
from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.gemm import QuantizedWeight
from oasis_cli.paths import user_path
from oasis_cli.progress import SILENT, Progress
from oasis_cli.quantization.baselines.stage import quantize_baseline
from oasis_cli.quantization.cache import cache_codebooks
from oasis_cli.quantization.folder import BlockFiles, block_of, finish_folder, with_sizes
from oasis_cli.quantization.methods import Job, QuantizedLayer, quantizer_of
from oasis_cli.quantization.selection import select_layers
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
    _refuse_other_model(checkpoint, calibration, calibration_folder)
    layers = select_layers(checkpoint, calibration, options)
    if options.is_baseline:
        sites = {name: layer.site for name, layer in layers.items()}
        found = quantize_baseline(
            checkpoint,
            out,
            calibration,
            sites,
            options,
            device=device,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
        return QuantizationResult.from_report(out, found, time.monotonic() - started)
    spec = _specify(checkpoint, calibration, calibration_folder, options, layers)
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


def _refuse_other_model(checkpoint: Checkpoint, calibration: Calibration, folder: Path) -> None:
    """Refuse a model that is quantized already, or a calibration that is not its own."""
    if checkpoint.quantization:
        raise InputError(f"{checkpoint.path}: already quantized ({checkpoint.quantization}); name the original model")
    if calibration.model_digest != checkpoint.digest:
        raise InputError(
            f"{folder}: made for another model ({calibration.manifest.get('model')}), not for {checkpoint.name}; "
            "run oasis calibrate on this one"
        )


def _specify(
    checkpoint: Checkpoint,
    calibration: Calibration,
    folder: Path,
    options: QuantizationSettings,
    layers: Mapping[str, LayerSpec],
) -> QuantizationSpec:
    """The specification of the folder to be; output channels are not known yet."""
    config = checkpoint.config
    fraction = float(calibration.recipe["outlier_fraction"])
    if options.outlier_fraction not in (None, fraction):
        raise InputError(
            f"{folder}: calibrated with outliers {fraction}, not {options.outlier_fraction}; "
            f"run oasis calibrate with --outliers {options.outlier_fraction}"
        )
    return QuantizationSpec(
        method=options.method,
        weight_bits=options.weight_bits,
        act_bits=options.act_bits,
        outlier_fraction=fraction,
        outlier_mode=options.outlier_mode if fraction > 0 else "none",
        scale_kind=options.scale_kind if options.refits else calibration.recipe["scale_kind"],
        codebook_grid=options.codebook_grid,
        layers=layers,
        cache=None if options.kv_bits is None else CacheSpec(options.kv_bits, _head_dim(config)),
    )


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _quantize_blocks(job: Job, files: BlockFiles, progress: Progress) -> None:
    """Every block's files, those excepted that an interrupted run finished."""
    quantizer = quantizer_of(job)
    caches = cache_codebooks(job.model, job.calibration.tokens, job.spec, job.options.seed, progress)
    with progress.task("quantizing", len(job.spec.layers), "layers") as task:
        for number, layers in files.blocks():
            # a block that is left alone too: later ones see what it gives
            if files.take_up(number):
                quantizer.take_over(block_of(number), partial(files.read_layers, number))
            else:
                found = quantizer.quantize(block_of(number), layers)
                files.write_block(number, {name: _to_disk(name, job, layer, caches.get(name)) for name, layer in found})
            task.advance(len(layers))


def _tune(job: Job, files: BlockFiles, kept: Path, run: str, progress: Progress) -> Mapping[str, Any]:
    """Tune the finished files; what was found is written down first, so that no interruption mixes old and new."""
    tuned = Tuned.load(kept, run)
    if tuned is None:
        inside = [number for number, _ in files.blocks() if block_of(number) >= 0]
        layers = {name: layer for number in inside for name, layer in files.read_layers(number).items()}
        tuned = tune(job, layers, progress)
        tuned.save(kept, run)
    for number, _ in files.blocks():
        files.replace(number, tuned.tensors)
    kept.unlink()
    return tuned.report


def _to_disk(
    name: str, job: Job, layer: QuantizedLayer, cache: Codebook | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    site, report = layer.site, layer.report.to_json()
    if site is None:
        return layer_tensors(name, job.spec, layer.weight, None, None, cache), report
    thresholds = job.calibration.sites[job.spec.layers[name].site].thresholds
    tensors = layer_tensors(name, job.spec, layer.weight, site.codebook, thresholds, cache)
    return tensors, report | {"site_grid_cost": site.grid_cost}


def layer_tensors(
    name: str,
    spec: QuantizationSpec,
    weight: QuantizedWeight,
    act_codebook: Codebook | None,
    thresholds: Tensor | None,
    cache_codebook: Codebook | None = None,
) -> dict[str, Tensor]:
    """A layer's tensors under the names they have on disk, as `declare_layer` promises them; its bias goes apart.

    Args:
        name: the layer.
        spec: of the folder.
        weight: N output channels of K.
        act_codebook: the site's; None where activations stay as they are.
        thresholds: the site's lower and upper, [2]; stored only where outliers are static.
        cache_codebook: of the keys or values that the layer gives; None where they stay as they are.
    """
    steps = weight.codebook.step, 0.0 if act_codebook is None else act_codebook.step
    tensors = {
        f"{name}.weight": pack_indices(weight.index),
        f"{name}.weight_codebook": weight.codebook.centroids,
        f"{name}.weight_scale": weight.scale,
        f"{name}.codebook_steps": torch.tensor(steps, dtype=torch.float32),
    }
    if act_codebook is not None:
        tensors[f"{name}.act_codebook"] = act_codebook.centroids.clone()  # safetensors stores no tensor twice
        if spec.outlier_mode == "static" and thresholds is not None:
            tensors[f"{name}.act_thresholds"] = thresholds.float().clone()
    if cache_codebook is not None:
        tensors[f"{name}.cache_codebook"] = cache_codebook.centroids
    return tensors
