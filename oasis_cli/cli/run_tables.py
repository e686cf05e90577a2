"""The table that a whole run ends with, for `run` and `demo`."""

from pathlib import Path
from typing import TYPE_CHECKING

from oasis_cli.cli.render import byte_size, show_table
from oasis_cli.cli.simulation_tables import energy

if TYPE_CHECKING:
    from oasis_cli.pipeline.run import RunResult


def show_run(result: "RunResult") -> None:
    """Before and after, speed and energy on the accelerator, time of every stage, and where everything is."""
    totals = result.simulation["totals"]
    quantization = result.quantization
    rows = []
    for before, after in zip(result.original["perplexity"], result.quantized["perplexity"], strict=True):
        text = Path(before["data"]).name
        rows.append([f"perplexity, {text}", f"{before['value']:.3f}", f"{after['value']:.3f}"])
    rows += [
        [
            "linear layers, 16 bits before",
            byte_size(quantization.bytes_before),
            byte_size(quantization.bytes_after),
        ],
        ["the rest, left as it is", byte_size(quantization.bytes_other), byte_size(quantization.bytes_other)],
        ["memory image", "", byte_size(result.image_bytes)],
    ]
    if totals["tokens_per_s"] is not None:
        rows += [
            [f"simulated speed, batch {result.simulation['batch']}", "", f"{totals['tokens_per_s']:,.0f} tokens/s"],
            ["simulated energy with HBM", "", f"{energy(totals['energy_per_token_pj'])} a token"],
            ["simulated energy, core only", "", f"{energy(totals['energy_core_per_token_pj'])} a token"],
        ]
    show_table(f"{result.model}, before and after", ["", "before", "after"], rows, numeric=[1, 2])
    places = {
        "calibrate": "calibration/",
        "quantize": "quantized/",
        "compile": "image/",
        "simulate": "simulation.json",
        "eval quantized": "run.json",
    }
    show_table(
        f"Artifacts in {result.folder}",
        ["stage", "time (s)", "artifact"],
        [[stage, f"{seconds:.1f}", places.get(stage, "")] for stage, seconds in result.seconds.items()],
        numeric=[1],
    )
