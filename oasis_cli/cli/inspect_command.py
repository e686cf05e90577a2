"""`oasis inspect`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oasis_cli.cli.options import UserPath, common_options, device_option, json_option, threads_option
from oasis_cli.cli.render import emit_json, head, progress_bars, show_pairs, show_table

if TYPE_CHECKING:
    from oasis_cli.calibration.consistency import Consistency


@click.command(name="inspect", epilog="Example: oasis inspect calibration --text wikitext2 --model ./SmolLM2-135M")
@click.argument("path")
@click.option("--text", metavar="NAME|PATH", help="Compare a calibration with what this text shows at every site.")
@click.option("--model", help="With --text: the model that was calibrated.")
@click.option("--samples", type=click.IntRange(1), default=4, show_default=True, help="With --text: sequences.")
@click.option("--seqlen", type=click.IntRange(2), default=512, show_default=True, help="With --text: tokens in each.")
@click.option("--site", metavar="NAME", help="With --plot: the site to draw.  [default: the first]")
@click.option("--plot", type=UserPath(), metavar="FILE", help="With --text: draw thresholds and centroids of a site.")
@device_option
@threads_option
@json_option
@common_options
def command(
    path: str,
    text: str | None,
    model: str | None,
    site: str | None,
    plot: Path | None,
    device: str,
    threads: int | None,
    **amount: int,
) -> None:
    """Show what PATH holds: a model, a calibration, a quantized folder or an image.

    With --text and --model, compare a calibration's thresholds and centroids with what another text shows.
    """
    if (text is None) != (model is None):
        raise click.UsageError("--text and --model go together")
    if text is None and (site or plot):
        raise click.UsageError("--site and --plot need --text and --model")
    if text is not None and model is not None:
        from oasis_cli.models.device import resolve_device

        found = _compare(path, model, text, str(resolve_device(device, threads)), amount, site, plot)
        _show(found, text, plot)
        return
    from oasis_cli.pipeline.inspecting import inspect

    held = inspect(path)
    if held.table:
        show_table("", held.headers, held.table, numeric=range(1, len(held.headers)))
    show_pairs(f"{path}: {held.kind}", held.facts)
    emit_json(head("inspect", {}) | {"kind": held.kind, "details": dict(held.details)})


def _compare(
    path: str, model: str, text: str, device: str, amount: Mapping[str, int], site: str | None, plot: Path | None
) -> "list[Consistency]":
    """Offline against online, and the picture."""
    from oasis_cli.formats.atomic import refuse_unwritable
    from oasis_cli.pipeline.consistency import choose_site, compare_with_text, draw

    if plot is not None:
        refuse_unwritable(plot)
    with progress_bars() as progress:
        found = compare_with_text(path, model, text, **amount, device=device, progress=progress)
    if plot is not None:
        draw(choose_site(found, site), plot)
    return found


def _show(found: "list[Consistency]", text: str, plot: Path | None) -> None:
    show_table(
        "Offline against online",
        ["site", "upper", "own 5…95 %", "kept", "least…most", "shift", "error"],
        [_row(each) for each in found],
        numeric=range(1, 7),
    )
    tokens = len(found[0].online_upper)
    show_pairs(
        f"{tokens:,} tokens of {text}",
        {
            "upper": "static threshold of the calibration; own: the tokens' own",
            "kept": "values of a token beyond static thresholds: mean, least and most; "
            f"dynamic search keeps {found[0].nominal_share:.2%} of each",
            "shift": "of the 16 centroids, the largest, over their span",
            "error": "of offline centroids on this text over that of its own, less 1",
            **({"picture": str(plot)} if plot is not None else {}),
        },
    )
    emit_json(head("inspect", {}) | {"kind": "consistency", "sites": {each.site: each.to_json() for each in found}})


def _row(site: "Consistency") -> list[str]:
    figures = site.to_json()
    own, shares = figures["threshold"]["online"]["upper"], figures["outlier_share"]
    return [
        site.site.removeprefix("model.layers.").replace("_proj", ""),
        f"{site.offline[1]:.3g}",
        f"{own[1]:.2g}…{own[3]:.2g}",
        f"{shares['static_mean']:.1%}",
        f"{shares['static'][0]:.1%}…{shares['static'][-1]:.1%}",
        f"{site.centroid_shift:.1%}",
        f"{site.extra_error:+.1%}",
    ]
