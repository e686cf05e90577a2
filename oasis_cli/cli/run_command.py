"""`oasis run`."""

from pathlib import Path

import click

from oasis_cli.cli.options import UserPath, common_options, device_option, json_option, threads_option
from oasis_cli.cli.render import emit_json, head, progress_bars
from oasis_cli.cli.run_tables import show_run
from oasis_cli.paths import user_path


def _changes(ctx: click.Context, param: click.Parameter, changes: tuple[str, ...]) -> tuple[str, ...]:
    for change in changes:
        key, equals, _ = change.partition("=")
        if not key or not equals:
            raise click.UsageError(f"--set {change}: expected key=value, as in quantize.act_bits=3", ctx)
    return changes


@click.command(
    name="run",
    epilog="Example: oasis run w4a4 --model ./SmolLM2-135M --out runs/smol --set calibrate.samples=4",
)
@click.argument("recipe")
@click.option("--model", metavar="MODEL", help="Folder, GGUF file or hub id.  [default: the recipe's]")
@click.option("--out", type=UserPath(), metavar="DIR", help="Folder for all artifacts.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_changes,
    help="Change a key of the recipe; repeatable.",
)
@device_option
@threads_option
@json_option
@common_options
def command(
    recipe: str, model: str | None, out: Path | None, changes: tuple[str, ...], device: str, threads: int | None
) -> None:
    """Run the whole chain that RECIPE describes: a YAML file, or a shipped recipe by name.

    Run it again after an interruption, and it goes on from what is there.
    """
    from oasis_cli.models.device import resolve_device
    from oasis_cli.pipeline.recipe import find_recipe, load_recipe
    from oasis_cli.pipeline.run import run_recipe

    settings = load_recipe(find_recipe(recipe), changes)
    chosen, place = model or settings.model, out or (user_path(settings.out) if settings.out else None)
    if chosen is None or place is None:
        raise click.UsageError("name the model and the place: --model and --out, or `model` and `out` in the recipe")
    with progress_bars() as progress:
        result = run_recipe(settings, chosen, place, device=str(resolve_device(device, threads)), progress=progress)
    show_run(result)
    emit_json(head("run", {"model": result.model_digest}) | result.to_json())
