"""`oasis inspect`."""

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from oasis_cli.cli.options import UserPath, common_options, device_option, json_option, threads_option
from oasis_cli.cli.render import emit_json, head, progress_bars, show_pairs, show_table

if TYPE_CHECKING:
    from oasis_cli.calibration.consistency import Consistency
    from oasis_cli.pipeline.consistency import Comparison


@click.command(
    name="inspect",
    epilog="Examples: oasis inspect quantized;  "
    "oasis inspect calibration --text wikitext2 --model ./SmolLM2-135M --plot site.png",
)
@click.argument("path")
@click.option("--text", metavar="NAME|PATH", help="Compare a calibration with what this text shows at every site.")
@click.option("--model", help="With --text: the model that was calibrated.")
@click.option("--samples", type=click.IntRange(1), default=4, show_default=True, help="With --text: sequences.")
@click.option("--seqlen", type=click.IntRange(2), default=512, show_default=True, help="With --text: tokens in each.")
@click.option("--plot", type=UserPath(), metavar="FILE", help="With --text: draw thresholds and centroids of a site.")
@click.option("--site", metavar="NAME", help="With --plot: the site to draw.  [default: the first]")
@device_option
@threads_option
@json_option
@common_options
def command(
    path: str,
    text: str | None,
    model: str | None,
    plot: Path | None,
    site: str | None,
    device: str,
    threads: int | None,
    **amount: int,
) -> None:
    """Show what PATH holds: a model, a calibration, a quantized folder or an image.

    With --text and --model, compare a calibration's thresholds and centroids with what another text shows.
    """
    if (text is None) != (model is None):
        raise click.UsageError("--text and --model go together")
    if plot is not None and text is None:
        raise click.UsageError("--plot goes with --text and --model")
    if site is not None and plot is None:
        raise click.UsageError("--site goes with --plot")
    if text is not None and model is not None:
        from oasis_cli.models.device import resolve_device
        from oasis_cli.pipeline.consistency import compare_with_text

        run_on = str(resolve_device(device, threads))
        with progress_bars() as progress:
            compared = compare_with_text(
                path, model, text, **amount, site=site, plot=plot, device=run_on, progress=progress
            )
        _show_comparison(compared, plot)
        emit_json(head("inspect", compared.inputs) | {"kind": "consistency"} | compared.to_json())
        return
    from oasis_cli.pipeline.inspecting import inspect

    found = inspect(path)
    if found.table:
        show_table("", found.headers, found.table, numeric=range(1, len(found.headers)))
    show_pairs(f"{path}: {found.kind}", found.facts)
    emit_json(head("inspect", {}) | {"kind": found.kind, "details": dict(found.details)})


def _show_comparison(compared: "Comparison", plot: Path | None) -> None:
    """Offline against online."""
    from oasis_cli.pipeline.inspecting import BRIEF_NAMES

    show_table(
        "Offline against online",
        ["site", "upper", "own 5…95 %", "kept", "least…most", "shift", "error"],
        [_row(site) for site in compared.sites],
        numeric=range(1, 7),
    )
    thresholds = median(site.upper.rmse for site in compared.sites)
    centroids = median(site.centroids.rmse for site in compared.sites)
    # rounded up to whole values, so that it depends on the site's width
    nominal = " or ".join(sorted({f"{site.nominal_share:.2%}" for site in compared.sites}))
    facts = {
        "RMSE": f"{thresholds:.2f} of upper thresholds, {centroids:.2f} of centroids; medians over sites, of values "
        "normalised to [0, 1]",
        "upper": "static threshold of the calibration; own: the tokens' own",
        "kept": "values of a token beyond static thresholds: mean, least and most; "
        f"dynamic search keeps {nominal} of each",
        "shift": "of the 16 centroids, the largest, over their span",
        "error": "of offline centroids on this text over that of its own, less 1",
        "names": BRIEF_NAMES,
    }
    title = f"{compared.samples} x {compared.seqlen} tokens of {compared.text}"
    show_pairs(title, facts | ({"picture": str(plot)} if plot is not None else {}))


def _row(site: "Consistency") -> list[str]:
    from oasis_cli.pipeline.inspecting import brief_name

    figures = site.to_json()
    own, kept = figures["threshold"]["upper"]["online"], figures["outlier_share"]["static"]
    return [
        brief_name(site.site),
        f"{float(site.upper.offline):.3g}",
        f"{own['p5']:.2g}…{own['p95']:.2g}",
        f"{kept['mean']:.1%}",
        f"{kept['min']:.1%}…{kept['max']:.1%}",
        f"{site.centroid_shift:.1%}",
        f"{site.extra_error:+.1%}",
    ]
