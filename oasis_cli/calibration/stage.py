"""The calibrate stage: model and text in, a calibration folder out."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as settings
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from oasis_cli.calibration.fisher import visit_sites
from oasis_cli.calibration.statistics import SiteStatistics
from oasis_cli.config import STRICT
from oasis_cli.data.text import load_text
from oasis_cli.data.windows import Windows, calibration_windows, refuse_beyond
from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import is_finished, output_directory
from oasis_cli.formats.calibration import (
    BITS,
    KIND,
    MANIFEST_NAME,
    SCHEMA_VERSION,
    TENSORS_NAME,
    TOKENS,
    SiteCalibration,
)
from oasis_cli.formats.calibration import site_tensors as tensors_of
from oasis_cli.formats.manifest import (
    digest_bytes,
    digest_file,
    manifest,
    read_sealed,
    refuse_other_run,
    write_sealed,
)
from oasis_cli.formats.tensors import save_tensors
from oasis_cli.models.checkpoint import Checkpoint
from oasis_cli.models.sites import Site, find_sites
from oasis_cli.numerics.kmeans import Clustering, cluster
from oasis_cli.numerics.scale import ScaleKind
from oasis_cli.paths import user_path
from oasis_cli.progress import SILENT, Progress

log = logging.getLogger(__name__)

_STATE_NAME = "state.safetensors"
_STATE_DIGEST = "run"


@settings(frozen=True, config=STRICT)
class CalibrationSettings:
    """How to calibrate.

    Attributes:
        dataset: a text: name of a data set, hub id or path; None takes the calibration part of the text that comes
            with Python.
        samples: sequences to draw from the text.
        seqlen: tokens of each sequence.
        seed: of the draw of sequences and of K-Means.
        outlier_fraction: outliers a side, as a share of a token's K values; they are left out of the clustering.
        scale_kind: the token scale s_t of the codebooks; method oasis-plus finds codebooks of its own.
        importance: what a value weighs in K-Means: `fisher`, its diagonal Fisher information as in the paper, or
            `error`, its squared error alone, which needs no backward pass and takes less than half the time.
    """

    dataset: str | None = None
    samples: int = Field(default=16, ge=1)
    seqlen: int = Field(default=2048, ge=2)
    seed: int = Field(default=0, ge=0)
    outlier_fraction: float = Field(default=0.005, ge=0, le=0.5)
    scale_kind: ScaleKind = "absmax"
    importance: Literal["fisher", "error"] = "fisher"


@dataclass(frozen=True)
class CalibrationResult:
    """What the stage did.

    Attributes:
        folder: the artifact.
        sites: number of sites.
        tokens: calibration tokens.
        loss: mean loss per token on the calibration text.
        optimum_won: clusterings in which the exact optimum beat faiss, of `clusterings`.
        clusterings: how many were made.
        data: name of the text.
        data_digest: its digest.
        model_digest: digest of the model.
        seconds: wall time; 0 where the artifact was there already.
    """

    folder: Path
    sites: int
    tokens: int
    loss: float
    optimum_won: int
    clusterings: int
    data: str
    data_digest: str
    model_digest: str
    seconds: float = 0.0

    @classmethod
    def from_manifest(cls, folder: Path, block: Mapping[str, Any], seconds: float = 0.0) -> "CalibrationResult":
        """The result that a finished calibration stands for."""
        made = [entry for site in block["sites"].values() for entry in site["kmeans"].values()]
        return cls(
            folder=folder,
            sites=len(block["sites"]),
            tokens=block["tokens"],
            loss=block["loss"],
            optimum_won=sum(entry["optimum_won"] for entry in made),
            clusterings=len(made),
            data=block["data"],
            data_digest=block["created_from"]["data"],
            model_digest=block["created_from"]["model"],
            seconds=seconds,
        )


def calibrate(
    checkpoint: Checkpoint,
    out: str | Path,
    options: CalibrationSettings,
    *,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> CalibrationResult:
    """Learn activation codebooks, static thresholds and second moments of every site.

    Args:
        checkpoint: the model, unquantized.
        out: folder for the artifact.
        options: text, amount, scale and outliers.
        device: where the model runs.
        resume: go on from the sequences that an interrupted run finished; a finished calibration is left as it is.
        overwrite: replace an earlier calibration at `out`.
        progress: who is told.

    Raises:
        InputError: the model is quantized already, the text is too short, `seqlen` is beyond the model's positions, a
            value is not finite, `out` is occupied.
    """
    started, out = time.monotonic(), user_path(out)
    if checkpoint.quantization:
        raise InputError(f"{checkpoint.path}: already quantized ({checkpoint.quantization}); name the original model")
    refuse_beyond(checkpoint.config.max_position_embeddings, options.seqlen, checkpoint.name)
    source = load_text(options.dataset, "calibration")
    block = manifest(KIND, SCHEMA_VERSION, {"model": checkpoint.digest, "data": source.digest}, asdict(options))
    if resume and is_finished(out, MANIFEST_NAME):
        existing = read_sealed(out / MANIFEST_NAME, KIND, SCHEMA_VERSION)
        refuse_other_run(out, existing, block)
        return CalibrationResult.from_manifest(out, existing)
    with output_directory(out, MANIFEST_NAME, overwrite=overwrite, resumable=True, resume=resume) as folder:
        windows = calibration_windows(
            source,
            checkpoint.load_tokenizer(),
            options.samples,
            options.seqlen,
            options.seed,
            checkpoint.config.vocab_size,
        )
        model = checkpoint.load_model(device=device)
        sites = find_sites(model)
        run = digest_bytes(json.dumps(block, sort_keys=True).encode())
        statistics, loss = _pass_tokens(model, sites, windows, options, folder / _STATE_NAME, run, progress)
        calibrations, clusterings = _cluster_sites(sites, statistics, options.seed, progress)
        save_tensors(folder / TENSORS_NAME, _sorted_tensors(calibrations, windows.tokens))
        (folder / _STATE_NAME).unlink(missing_ok=True)
        block |= {
            "model": checkpoint.name,
            "data": source.name,
            "loss": loss,
            "tokens": windows.tokens.numel(),
            "tensors_digest": digest_file(folder / TENSORS_NAME),
            "sites": {site.name: _describe(site, statistics[site.name], clusterings[site.name]) for site in sites},
        }
        write_sealed(folder / MANIFEST_NAME, block)
    return CalibrationResult.from_manifest(out, block, time.monotonic() - started)


def _pass_tokens(
    model: nn.Module,
    sites: Sequence[Site],
    windows: Windows,
    options: CalibrationSettings,
    state: Path,
    run: str,
    progress: Progress,
) -> tuple[dict[str, SiteStatistics], float]:
    """Run every sequence, saving the sums after each, so that a killed run loses one sequence at most."""
    statistics = {site.name: SiteStatistics.empty(site.K) for site in sites}
    done, total = _load_state(state, run, statistics)
    device = next(model.parameters()).device

    def visit(site: Site, x: Tensor, gradient: Tensor | None) -> None:
        statistics[site.name].add(site.name, x, gradient, options.outlier_fraction, options.scale_kind)

    with progress.task("calibrating", len(windows.tokens), "sequences") as task:
        task.advance(done)
        for number, tokens in enumerate(windows.tokens[done:], start=done + 1):
            total += visit_sites(model, sites, tokens[None].to(device), visit, options.importance == "fisher")
            _save_state(state, run, statistics, number, total)
            task.advance()
    return statistics, total / len(windows.tokens)


def _save_state(path: Path, run: str, statistics: dict[str, SiteStatistics], done: int, loss: float) -> None:
    tensors = {f"{name}/{key}": value for name, site in statistics.items() for key, value in site.state().items()}
    tensors["progress"] = torch.tensor([done, loss], dtype=torch.float64)
    save_tensors(path, tensors, {_STATE_DIGEST: run})


def _load_state(path: Path, run: str, statistics: dict[str, SiteStatistics]) -> tuple[int, float]:
    """Take up the sums of an interrupted run with the same model, text and settings; (sequences done, loss)."""
    if not path.is_file():
        return 0, 0.0
    try:
        with safe_open(path, "pt") as file:
            same = (file.metadata() or {}).get(_STATE_DIGEST) == run
        tensors = load_file(path)
    except SafetensorError:
        same = False
    if not same:
        raise InputError(
            f"{path.parent}: left by a run with other settings; delete it, or resume with the same settings"
        )
    for name in statistics:
        state = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
        statistics[name] = SiteStatistics.from_state(state)
    done, loss = tensors["progress"].tolist()
    log.info("resuming after %d finished sequences", int(done))
    return int(done), loss


def _cluster_sites(
    sites: Sequence[Site], statistics: dict[str, SiteStatistics], seed: int, progress: Progress
) -> tuple[dict[str, SiteCalibration], dict[str, dict[int, Clustering]]]:
    """Weighted K-Means of every site, for every number of bits."""
    calibrations, clusterings = {}, {}
    with progress.task("clustering activations", len(sites), "sites") as task:
        for site in sites:
            found = statistics[site.name]
            points = found.histogram.points()
            if not len(points.values):
                raise InputError(
                    f"{site.name}: calibration saw nothing but zeros and outliers; use another text, or fewer outliers"
                )
            by_size = cluster(points, tuple(2**bits for bits in BITS), seed)
            clusterings[site.name] = by_size
            calibrations[site.name] = SiteCalibration(
                layers=site.layers,
                centroids={bits: torch.from_numpy(by_size[2**bits].centroids) for bits in BITS},
                points=points,
                thresholds=found.thresholds(),
                second_moments=(found.second_moments / found.tokens).float(),
            )
            task.advance()
    return calibrations, clusterings


def _sorted_tensors(calibrations: dict[str, SiteCalibration], tokens: Tensor) -> dict[str, Tensor]:
    tensors = {key: value for name, site in calibrations.items() for key, value in tensors_of(name, site).items()}
    tensors[TOKENS] = tokens.int()
    return {key: tensors[key].contiguous() for key in sorted(tensors)}


def _describe(site: Site, found: SiteStatistics, clusterings: dict[int, Clustering]) -> dict[str, Any]:
    """A site's entry in the manifest."""
    return {
        "layers": list(site.layers),
        "block": site.block,
        "K": site.K,
        **found.summary(),
        "kmeans": {
            str(bits): {
                "error": clusterings[2**bits].error,
                "faiss_error": clusterings[2**bits].faiss_error,
                "optimum_won": clusterings[2**bits].optimum_won,
            }
            for bits in BITS
        },
    }
