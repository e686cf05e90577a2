"""`oasis simulate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oasis_cli.cli.options import UserPath, common_options, json_option, lay_over
from oasis_cli.cli.render import emit_json, head, progress_bars
from oasis_cli.cli.simulation_tables import show_functional, show_simulation

if TYPE_CHECKING:
    from oasis_cli.pipeline.settings import SimulationSettings


@click.command(
    name="simulate",
    epilog="Examples: oasis simulate image --decode 256;  oasis simulate --shape llama-2-7b --prefill 512;  "
    "oasis simulate image --functional --reference quantized",
)
@click.argument("image", type=UserPath(), required=False)
@click.option("--shape", metavar="NAME|FILE", help="Time a model by its sizes alone, without weights.")
@click.option("--target", metavar="NAME|FILE", help="Accelerator.  [default: the image's, or oasis-28nm]")
@click.option("--recipe", type=UserPath(), metavar="FILE", help="Take settings from a recipe.")
@click.option("--batch", type=int, help="Sequences side by side.  [default: 1]")
@click.option("--prefill", type=int, help="Tokens of each prompt.  [default: 0]")
@click.option("--decode", type=int, help="Tokens to generate.  [default: 2048, or what the positions allow]")
@click.option("--weight-bits", type=click.IntRange(1, 4), help="With --shape.  [default: 4]")
@click.option("--act-bits", type=click.IntRange(1, 4), help="With --shape.  [default: 4]")
@click.option(
    "--outliers", "outlier_fraction", type=click.FloatRange(0, 0.5), help="With --shape, a side.  [default: 0.005]"
)
@click.option("--functional", is_flag=True, help="Run the image bit-true on tokens, too.")
@click.option("--reference", type=UserPath(), metavar="DIR", help="Quantized folder to compare with.")
@click.option("--ppl", metavar="NAME|PATH", help="Text for --functional.  [default: Python's documentation]")
@click.option("--seqlen", type=click.IntRange(2), default=256, show_default=True, help="Window for --functional.")
@click.option("--limit", type=click.IntRange(1), default=1, show_default=True, help="Windows for --functional.")
@click.option(
    "--engine",
    type=click.Choice(["counted", "gathered"]),
    default="counted",
    show_default=True,
    help="counted: as the hardware; gathered: faster, same bits.",
)
@json_option
@common_options
def command(
    image: Path | None,
    shape: str | None,
    target: str | None,
    recipe: Path | None,
    weight_bits: int | None,
    act_bits: int | None,
    outlier_fraction: float | None,
    functional: bool,
    reference: Path | None,
    ppl: str | None,
    seqlen: int,
    limit: int,
    engine: Any,
    **given: Any,
) -> None:
    """Cycles, traffic and energy of IMAGE, or of a model's sizes with --shape, on the accelerator."""
    if (image is None) == (shape is None):
        raise click.UsageError("name an image, or a model's sizes with --shape; one of the two")
    if functional and image is None:
        raise click.UsageError("--functional needs an image: sizes alone compute nothing")
    if reference is not None and not functional:
        raise click.UsageError("--reference goes with --functional")
    quantization = {"weight_bits": weight_bits, "act_bits": act_bits, "outlier_fraction": outlier_fraction}
    sizes_only: dict[str, Any] = {name: value for name, value in quantization.items() if value is not None}
    if image is not None and sizes_only:
        raise click.UsageError("--weight-bits, --act-bits and --outliers go with --shape: an image has its own")
    options = _settings(recipe, given)
    result: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    if image is not None:
        from oasis_cli.pipeline.simulating import run_functional, simulate_image

        report, inputs["image"] = simulate_image(image, options, target)
        if functional:
            with progress_bars() as progress:
                run = run_functional(
                    image, text=ppl, seqlen=seqlen, limit=limit, reference=reference, engine=engine, progress=progress
                )
            show_functional(run)
            result["functional"] = run.to_json()
            inputs[run.perplexity.data] = run.perplexity.digest
    else:
        from oasis_cli.pipeline.shapes import simulate_shape

        report = simulate_shape(str(shape), options, target or "oasis-28nm", **sizes_only)
    show_simulation(report)
    emit_json(head("simulate", inputs) | report.to_json() | result)


def _settings(recipe: Path | None, given: dict[str, Any]) -> "SimulationSettings":
    """The recipe's settings, if there is one, under the options given; without a recipe nothing heavy is imported."""
    from oasis_cli.pipeline.settings import SimulationSettings

    if recipe is None:
        return lay_over(SimulationSettings(), given)
    from oasis_cli.pipeline.recipe import stage_settings

    return lay_over(stage_settings(recipe).simulate, given)
