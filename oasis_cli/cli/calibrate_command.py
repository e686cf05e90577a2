"""`oasis calibrate`."""

from pathlib import Path
from typing import Any

import click

from oasis_cli.cli.options import (
    UserPath,
    common_options,
    device_option,
    json_option,
    lay_over,
    out_option,
    overwrite_option,
    resume_option,
    threads_option,
)
from oasis_cli.cli.render import emit_json, head, progress_bars, show_pairs


@click.command(
    name="calibrate",
    epilog="Example: oasis calibrate ./SmolLM2-135M --dataset text.jsonl --samples 16 --seqlen 2048 --out calibration",
)
@click.argument("model")
@out_option
@click.option("--recipe", type=UserPath(), metavar="FILE", help="Take settings from a recipe.")
@click.option("--dataset", metavar="NAME|PATH", help="wikitext2, c4, ptb, a hub id, or a text, jsonl or parquet file.")
@click.option("--samples", type=int, help="Sequences.  [default: 16]")
@click.option("--seqlen", type=int, help="Tokens in each.  [default: 2048]")
@click.option("--seed", type=int, help="Of the draw and of K-Means.  [default: 0]")
@click.option("--outliers", "outlier_fraction", type=float, help="Outliers a side, as a share.  [default: 0.005]")
@click.option(
    "--scale-kind",
    metavar="KIND",
    help="Token scale, for methods oasis and oasis-s: absmax, rms, mean_abs, inlier_absmax.  [default: absmax]",
)
@click.option("--importance", metavar="KIND", help="Of a value in K-Means: fisher or error.  [default: fisher]")
@device_option
@threads_option
@resume_option
@overwrite_option
@json_option
@common_options
def command(
    model: str,
    out: Path,
    recipe: Path | None,
    device: str,
    threads: int | None,
    resume: bool,
    overwrite: bool,
    **given: Any,
) -> None:
    """Learn activation codebooks, outlier thresholds and second moments from MODEL and a text.

    MODEL is a Hugging Face folder, a GGUF file or a hub id. One backward pass a sequence gives the Fisher weights.
    Without --dataset the text is the documentation that comes with Python.
    """
    from oasis_cli.calibration import calibrate
    from oasis_cli.formats.manifest import short_digest
    from oasis_cli.models.checkpoint import open_checkpoint
    from oasis_cli.models.device import resolve_device
    from oasis_cli.pipeline.recipe import stage_settings

    options = lay_over(stage_settings(recipe).calibrate, given)
    checkpoint = open_checkpoint(model)
    with progress_bars() as progress:
        result = calibrate(
            checkpoint,
            out,
            options,
            device=str(resolve_device(device, threads)),
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
    show_pairs(
        f"Calibration of {checkpoint.name}",
        {
            "folder": str(result.folder),
            "text": f"{result.data} ({short_digest(result.data_digest)})",
            "tokens": f"{result.tokens:,} in {options.samples} sequences",
            "loss": f"{result.loss:.4f} nats a token",
            "sites": str(result.sites),
            "K-Means": f"faiss missed the optimum in {result.optimum_won} of {result.clusterings} clusterings"
            + ("; the exact optimum was used" if result.optimum_won else ""),
            "time": f"{result.seconds:.1f} s",
        },
    )
    emit_json(
        head("calibrate", {"model": result.model_digest, "data": result.data_digest})
        | {"folder": str(result.folder), "sites": result.sites, "tokens": result.tokens, "loss": result.loss}
        | {"kmeans": {"clusterings": result.clusterings, "optimum_won": result.optimum_won}, "seconds": result.seconds}
    )
