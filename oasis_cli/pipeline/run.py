"""A recipe's run: the five stages chained by their folders, each skipped where an equal result is there already."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from oasis_cli.calibration import CalibrationResult, calibrate
from oasis_cli.compiler.compile import compile_model, image_target
from oasis_cli.compiler.model import read_shape, rotary_frequencies
from oasis_cli.compiler.program import build_program
from oasis_cli.compiler.verify import verify_image
from oasis_cli.data.windows import refuse_beyond
from oasis_cli.errors import InputError
from oasis_cli.formats.image import open_image
from oasis_cli.formats.manifest import digest_bytes, read_json, write_json
from oasis_cli.hardware.target import load_target
from oasis_cli.models.checkpoint import Checkpoint, open_checkpoint
from oasis_cli.paths import user_path
from oasis_cli.pipeline.artifacts import image_file
from oasis_cli.pipeline.evaluating import cut_windows, evaluate, load_texts
from oasis_cli.pipeline.recipe import Recipe
from oasis_cli.pipeline.simulating import simulate_image
from oasis_cli.progress import SILENT, Progress
from oasis_cli.quantization import QuantizationResult, quantize
from oasis_cli.simulator.timing import simulate as time_program

T = TypeVar("T")

log = logging.getLogger(__name__)

RESULT_NAME = "run.json"
_PREPARATIONS = ("open", "check")


@dataclass
class RunResult:
    """A finished run.

    Attributes:
        folder: all artifacts.
        model: name of the original.
        model_digest: its digest.
        calibration: result of the stage.
        quantization: result of the stage.
        simulation: the report as JSON.
        original: evaluation of the original, as JSON.
        quantized: evaluation of the quantized folder, as JSON.
        image_bytes: size of the image.
        seconds: wall time of each stage in this run; a stage whose result was there takes next to nothing.
    """

    folder: Path
    model: str
    model_digest: str
    calibration: CalibrationResult
    quantization: QuantizationResult
    simulation: dict[str, Any]
    original: dict[str, Any]
    quantized: dict[str, Any]
    image_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The result for `--json`."""
        return {
            "model": self.model,
            "folder": str(self.folder),
            "calibrate": {"tokens": self.calibration.tokens, "loss": self.calibration.loss},
            "quantize": {
                "relative_error": self.quantization.relative_error,
                "bytes": {
                    "before": self.quantization.bytes_before,
                    "after": self.quantization.bytes_after,
                    "other": self.quantization.bytes_other,
                },
            },
            "compile": {"bytes": self.image_bytes},
            "simulate": self.simulation["totals"],
            "eval": {"original": self.original, "quantized": self.quantized},
            "seconds": self.seconds,
        }


class _Clock:
    """Times stages by name, and says in the log when one is done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def stage(self, name: str, work: Callable[[], T]) -> T:
        """Run a stage and note how long it took."""
        started = time.monotonic()
        result = work()
        self.seconds[name] = time.monotonic() - started
        if self.seconds[name] >= 1 and name not in _PREPARATIONS:  # nobody waited for the others
            log.info("%s: done in %.1f s", name, self.seconds[name])
        return result


def run_recipe(
    recipe: Recipe, model: str | Path, out: str | Path, *, device: str = "cpu", progress: Progress = SILENT
) -> RunResult:
    """Run calibrate, quantize, compile, simulate and eval, each into its folder below `out`.

    A run that was interrupted, or whose later settings changed, goes on from what is there.

    Args:
        recipe: settings of all stages; its own `model` and `out` are not looked at.
        model: the original.
        out: folder for all artifacts.
        device: where models run.
        progress: who is told.

    Raises:
        InputError: as the stages do, what can be known beforehand before any of them runs; or an earlier stage's
            folder holds a result with other settings.
    """
    clock, out = _Clock(), user_path(out)
    checkpoint = clock.stage("open", lambda: open_checkpoint(model))
    texts = clock.stage("check", lambda: _look_ahead(recipe, checkpoint))
    places = {name: out / name for name in ("calibration", "quantized", "image")}
    calibration = clock.stage(
        "calibrate",
        lambda: calibrate(
            checkpoint, places["calibration"], recipe.calibrate, device=device, resume=True, progress=progress
        ),
    )
    quantization = clock.stage(
        "quantize",
        lambda: quantize(
            checkpoint,
            places["quantized"],
            places["calibration"],
            recipe.quantize,
            device=device,
            resume=True,
            progress=progress,
        ),
    )
    clock.stage("compile", lambda: _compile(places, recipe.compile.target, progress))
    report, image_digest = clock.stage(
        "simulate", lambda: simulate_image(places["image"], recipe.simulate, recipe.compile.target)
    )
    write_json(out / "simulation.json", report.to_json() | {"inputs": {"image": image_digest}})
    original = clock.stage("eval original", lambda: _evaluate(checkpoint, texts, out, recipe, device, progress))
    quantized = clock.stage(
        "eval quantized",
        lambda: _evaluate(open_checkpoint(places["quantized"]), texts, out, recipe, device, progress),
    )
    result = RunResult(
        folder=out,
        model=checkpoint.name,
        model_digest=checkpoint.digest,
        calibration=calibration,
        quantization=quantization,
        simulation=report.to_json(),
        original=original,
        quantized=quantized,
        image_bytes=image_file(places["image"]).stat().st_size,
        seconds=clock.seconds,
    )
    write_json(out / RESULT_NAME, result.to_json())
    return result


def _look_ahead(recipe: Recipe, checkpoint: Checkpoint) -> dict[str, str]:
    """Refuse now what a later stage would refuse after hours; the digests of the texts to evaluate on."""
    config, quantization, outliers = checkpoint.config, recipe.quantize, recipe.calibrate.outlier_fraction
    for key, seqlen in (("calibrate.seqlen", recipe.calibrate.seqlen), ("eval.seqlen", recipe.eval.seqlen)):
        cure = f"{key}, in the recipe or with --set of oasis run"
        refuse_beyond(config.max_position_embeddings, seqlen, checkpoint.name, cure)
    if quantization.foreign_to_accelerator:
        raise InputError(
            f"recipe: the accelerator, which oasis run compiles for, cannot run {quantization.foreign_to_accelerator}; "
            "run oasis calibrate, quantize and eval one by one"
        )
    if quantization.outlier_fraction not in (None, outliers):
        raise InputError(
            f"recipe: quantize.outlier_fraction is {quantization.outlier_fraction}, calibrate.outlier_fraction "
            f"{outliers}; give both the same, or only the latter"
        )
    shape = read_shape(config, str(checkpoint.path))
    rotary_frequencies(config, str(checkpoint.path))
    program = build_program(shape, quantization.weight_bits, quantization.act_bits, outliers)
    lengths, target = recipe.simulate, load_target(recipe.compile.target)
    decode = lengths.decode_within(shape.max_positions)
    time_program(program, shape, target, lengths.batch, lengths.prefill, decode)
    sources = load_texts(recipe.eval)
    cut_windows(sources, recipe.eval, checkpoint.load_tokenizer(), config.vocab_size)
    return {source.name: source.digest for source in sources}


def _compile(places: dict[str, Path], target: str, progress: Progress) -> None:
    """Compile, unless the image that is there came from this very folder for this target."""
    image = image_file(places["image"])
    if image.is_file():
        found, due = open_image(image).metadata().target, image_target(load_target(target))
        if found == due:
            verify_image(places["image"], places["quantized"], progress)
            return
        raise InputError(
            f"{places['image']}: compiled for {found.name} with {found.pe_lines} lines, not for {due.name} with "
            f"{due.pe_lines}; choose another --out"
        )
    compile_model(places["quantized"], places["image"], target, progress=progress)


def _evaluate(
    checkpoint: Checkpoint, texts: dict[str, str], out: Path, recipe: Recipe, device: str, progress: Progress
) -> dict[str, Any]:
    """Evaluate, unless an evaluation of these very weights on these very texts with these settings is there."""
    settings = asdict(recipe.eval) | {"ppl": list(recipe.eval.ppl)}
    wanted = {"model": checkpoint.digest, "texts": texts, "settings": settings}
    key = digest_bytes(repr(wanted).encode()).removeprefix("sha256:")[:12]
    place = out / f"evaluation-{key}.json"
    if place.is_file():
        kept = read_json(place)
        if kept.get("wanted") == wanted:
            return dict(kept["result"])
    result = evaluate(checkpoint.path, recipe.eval, device=device, progress=progress).to_json()
    write_json(place, {"wanted": wanted, "result": result})
    return result
