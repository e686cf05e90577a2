"""`oasis eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oasis_cli.cli.options import UserPath, common_options, device_option, json_option, lay_over, threads_option
from oasis_cli.cli.render import emit_json, head, progress_bars, show_line, show_table

if TYPE_CHECKING:
    from oasis_cli.evaluation.perplexity import PerplexityResult


@click.command(
    name="eval", epilog="Example: oasis eval quantized --ppl wikitext2 --ppl my-text.txt --seqlen 2048 --limit 8"
)
@click.argument("target")
@click.option("--ppl", multiple=True, metavar="NAME|PATH", help="wikitext2, c4, ptb, a hub id or a file; repeatable.")
@click.option("--recipe", type=UserPath(), metavar="FILE", help="Take settings from a recipe.")
@click.option("--seqlen", type=int, help="Tokens in a window.  [default: 2048]")
@click.option("--limit", type=int, help="Windows of each text.  [default: all]")
@click.option("--against", metavar="REF", help="Compare predictions with this model's: KL, top-1 agreement.")
@device_option
@threads_option
@json_option
@common_options
def command(
    target: str,
    ppl: tuple[str, ...],
    recipe: Path | None,
    against: str | None,
    device: str,
    threads: int | None,
    **given: Any,
) -> None:
    """Perplexity of TARGET: a model, a quantized folder, or an image (run bit-true, on the CPU).

    Windows of --seqlen tokens that do not overlap, mean over all predicted tokens, as the quantization papers do.
    Without --ppl the text is the documentation that comes with Python.
    """
    from oasis_cli.models.device import resolve_device
    from oasis_cli.pipeline.evaluating import evaluate
    from oasis_cli.pipeline.recipe import stage_settings

    options = lay_over(stage_settings(recipe).eval, given | {"ppl": ppl or None})
    with progress_bars() as progress:
        result = evaluate(
            target, options, against=against, device=str(resolve_device(device, threads)), progress=progress
        )
    rows = [
        [
            Path(found.data).name,
            f"{found.value:.3f}" + (f" ± {found.stderr:.3f}" if found.stderr is not None else ""),
            f"{found.tokens:,}",
            f"{found.windows} x {found.seqlen}",
            "yes" if found.bos else "no",
        ]
        for found in result.perplexities
    ]
    show_table(
        f"Perplexity of {result.target} ({result.kind})",
        ["text", "perplexity", "tokens", "windows", "BOS"],
        rows,
        numeric=[1, 2, 3],
    )
    if result.reference is not None:
        show_table(
            f"Against {result.reference[0]}",
            ["text", "times its perplexity", "KL (nats)", "largest", "same top-1"],
            [_compared(found) for found in result.perplexities],
            numeric=[1, 2, 3, 4],
        )
    for found in result.perplexities:
        show_line(f"{Path(found.data).name}\n  {found.digest}")
    emit_json(head("eval", result.inputs) | result.to_json())


def _compared(found: "PerplexityResult") -> list[str]:
    """A text's row of the comparison."""
    other = found.against
    if other is None:
        raise ValueError(f"{found.data} was not compared")
    return [
        Path(found.data).name,
        f"{other.ratio:.3f}" + (f" ± {other.ratio_stderr:.3f}" if other.ratio_stderr is not None else ""),
        f"{other.kl_mean:.4f}" + (f" ± {other.kl_stderr:.4f}" if other.kl_stderr is not None else ""),
        f"{other.kl_max:.2f}",
        f"{other.top1_agreement:.2%}",
    ]
