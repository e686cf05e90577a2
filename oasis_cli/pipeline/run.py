"""A recipe's run: the five stages chained by their folders, each skipped where an equal result is there already."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from oasis_cli.calibration import CalibrationResult, calibrate
from oasis_cli.compiler.compile import compile_model
from oasis_cli.compiler.verify import verify_image
from oasis_cli.errors import InputError
from oasis_cli.formats.image import open_image
from oasis_cli.formats.manifest import digest_bytes, read_json, write_json
from oasis_cli.models.checkpoint import Checkpoint, open_checkpoint
from oasis_cli.pipeline.artifacts import image_file
from oasis_cli.pipeline.evaluating import evaluate
from oasis_cli.pipeline.recipe import Recipe
from oasis_cli.pipeline.simulating import simulate_image
from oasis_cli.progress import SILENT, Progress
from oasis_cli.quantization import QuantizationResult, quantize

T = TypeVar("T")

RESULT_NAME = "run.json"


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
    """Times stages by name and tells the progress listener which one runs."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    def stage(self, name: str, work: Callable[[], T]) -> T:
        """Run a stage and note how long it took."""
        started = time.monotonic()
        result = work()
        self.seconds[name] = time.monotonic() - started
        return result


def run_recipe(recipe: Recipe, model: str, out: Path, *, device: str = "cpu", progress: Progress = SILENT) -> RunResult:
    """Run calibrate, quantize, compile, simulate and eval, each into its folder below `out`.

    A run that was interrupted, or whose later settings changed, goes on from what is there.

    Args:
        recipe: settings of all stages; its own `model` and `out` are not looked at.
        model: the original.
        out: folder for all artifacts.
        device: where models run.
        progress: who is told.

    Raises:
        InputError: as the stages do; or an earlier stage's folder holds a result with other settings.
    """
    clock = _Clock(progress)
    checkpoint = clock.stage("open", lambda: open_checkpoint(model))
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
            checkpoint, places["quantized"], places["calibration"], recipe.quantize, resume=True, progress=progress
        ),
    )
    clock.stage("compile", lambda: _compile(places, recipe.compile.target, progress))
    report, image_digest = clock.stage("simulate", lambda: simulate_image(places["image"], recipe.simulate))
    write_json(out / "simulation.json", report.to_json() | {"inputs": {"image": image_digest}})
    original = clock.stage(
        "eval original", lambda: _evaluate(checkpoint, checkpoint.path, out, recipe, device, progress)
    )
    quantized = clock.stage(
        "eval quantized",
        lambda: _evaluate(open_checkpoint(places["quantized"]), places["quantized"], out, recipe, device, progress),
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


def _compile(places: dict[str, Path], target: str, progress: Progress) -> None:
    """Compile, unless the image that is there came from this very folder for this target."""
    image = image_file(places["image"])
    if image.is_file():
        metadata = open_image(image).metadata()
        if metadata.target.name == target:
            verify_image(places["image"], places["quantized"], progress)
            return
        raise InputError(f"{places['image']}: compiled for {metadata.target.name}, not {target}; choose another --out")
    compile_model(places["quantized"], places["image"], target, progress=progress)


def _evaluate(
    checkpoint: Checkpoint, target: Path, out: Path, recipe: Recipe, device: str, progress: Progress
) -> dict[str, Any]:
    """Evaluate, unless an evaluation of these very weights with these settings is there."""
    wanted = {"model": checkpoint.digest, "settings": asdict(recipe.eval) | {"ppl": list(recipe.eval.ppl)}}
    key = digest_bytes(repr(wanted).encode()).removeprefix("sha256:")[:12]
    place = out / f"evaluation-{key}.json"
    if place.is_file():
        kept = read_json(place)
        if kept.get("wanted") == wanted:
            return dict(kept["result"])
    result = evaluate(target, recipe.eval, device=device, progress=progress).to_json()
    write_json(place, {"wanted": wanted, "result": result})
    return result
