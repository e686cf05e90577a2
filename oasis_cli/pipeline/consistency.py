"""`oasis inspect CALIBRATION --text`: offline against online thresholds and centroids, as figures and as a picture."""

import difflib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oasis_cli.calibration.consistency import Consistency, measure_consistency
from oasis_cli.data.text import load_text
from oasis_cli.data.windows import refuse_beyond, token_windows
from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import refuse_unwritable, write_result
from oasis_cli.formats.calibration import read_calibration
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.paths import user_path
from oasis_cli.pipeline.inspecting import brief_name
from oasis_cli.progress import SILENT, Progress

_TOKENS: Final = 128
"""Tokens that the paper's Fig. 3 draws."""


@dataclass(frozen=True)
class Comparison:
    """A calibration against another text.

    Attributes:
        text: its name.
        samples: sequences of it that were passed.
        seqlen: tokens in each.
        sites: in the order in which the model computes them.
        inputs: digests of what was read, by name.
    """

    text: str
    samples: int
    seqlen: int
    sites: tuple[Consistency, ...]
    inputs: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Everything but the tokens' own values."""
        return {
            "text": self.text,
            "samples": self.samples,
            "seqlen": self.seqlen,
            "sites": {site.site: site.to_json() for site in self.sites},
        }


def compare_with_text(
    calibration: str | Path,
    model: str | Path,
    text: str,
    *,
    samples: int = 4,
    seqlen: int = 512,
    site: str | None = None,
    plot: str | Path | None = None,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> Comparison:
    """Compare a calibration with what another text shows at every site.

    Args:
        calibration: its folder.
        model: what was calibrated.
        text: name or path of a text.
        samples: windows from the text's start; all, if it has fewer.
        seqlen: tokens in each.
        site: which to draw, by its whole name or as tables show it; None takes the first, as the paper does.
        plot: where to draw; None draws nothing.
        device: where the model runs.
        progress: who is told.

    Raises:
        InputError: not this model's calibration, no such site, a text that is too short, or a picture that cannot be
            drawn; all known before the model runs.
    """
    found = read_calibration(calibration)
    chosen = None if site is None else find_site(site, found.sites)
    picture = None if plot is None else user_path(plot)
    if picture is not None:
        _refuse_undrawable(picture)
    checkpoint = open_checkpoint(model)
    refuse_beyond(checkpoint.config.max_position_embeddings, seqlen, checkpoint.name)
    source = load_text(text, "evaluation")
    windows = token_windows(source, checkpoint.load_tokenizer(), seqlen, samples, checkpoint.config.vocab_size)
    sites = tuple(measure_consistency(checkpoint, found, windows, device=device, progress=progress))
    if picture is not None:
        draw(next(each for each in sites if chosen in (None, each.site)), picture)
    return Comparison(
        text=source.name,
        samples=len(windows.tokens),
        seqlen=seqlen,
        sites=sites,
        inputs={"model": checkpoint.digest, "calibration": found.digest, source.name: source.digest},
    )


def find_site(name: str, sites: Iterable[str]) -> str:
    """The whole name of the site that is called `name`, whole or in brief.

    Raises:
        InputError: there is none; the nearest name is suggested.
    """
    called = {brief_name(site): site for site in sites} | {site: site for site in sites}
    if name not in called:
        near = difflib.get_close_matches(name, called, n=1, cutoff=0.3) or list(called)
        raise InputError(f"--site {name}: no such site; did you mean {near[0]}?")
    return called[name]


def _refuse_undrawable(path: Path) -> None:
    """Check that `draw` may draw there, before minutes of work.

    Raises:
        InputError: matplotlib is not installed, a suffix that it does not know, or a place that cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            f'{path}: drawing needs matplotlib, which is not installed; run pip install "oasis-cli[plots]"'
        ) from None
    if _file_type(path) not in Figure().canvas.get_supported_filetypes():
        raise InputError(f"{path}: unknown kind of picture; let the name end in .png, .svg or .pdf")
    refuse_unwritable(path)


def _file_type(path: Path) -> str:
    """What matplotlib calls the kind of picture."""
    return path.suffix.removeprefix(".").lower()


def draw(site: Consistency, path: Path) -> None:
    """Draw upper thresholds of the first 128 tokens, and centroids, normalised to [0, 1] as in Figs. 3 and 5.

    Args:
        site: what to draw.
        path: the picture; its suffix says of which kind (png, svg, pdf).

    Raises:
        InputError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    thresholds, centroids = figure.subplots(1, 2)
    static, own = site.upper.normalised()
    thresholds.plot(own[:_TOKENS], ".", label="online, each token's own")
    thresholds.axhline(float(static), color="C1", label="offline, static")
    thresholds.set(xlabel="token", ylabel="upper threshold, normalised")
    thresholds.set_title(f"Outlier thresholds, RMSE {site.upper.rmse:.2f} over {site.tokens:,} tokens")
    offline, online = site.centroids.normalised()
    centroids.plot(online, "o", label="online")
    centroids.plot(offline, "x", label="offline")
    centroids.set(xlabel="centroid", ylabel="$x / s_t$, normalised", title=f"Centroids, RMSE {site.centroids.rmse:.2f}")
    for panel in (thresholds, centroids):
        panel.set_ylim(-0.05, 1.05)
        # below the panel, where it hides no point
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)
    figure.suptitle(site.site, fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=_file_type(path), dpi=150)
    write_result(path, drawn.getvalue())
