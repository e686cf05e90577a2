"""`oasis inspect CALIBRATION --text`: offline against online thresholds and centroids, as figures and as a picture."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from oasis_cli.calibration.consistency import Consistency, measure_consistency
from oasis_cli.data.text import load_text
from oasis_cli.data.windows import refuse_beyond, token_windows
from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import atomic_file
from oasis_cli.formats.calibration import read_calibration
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.progress import SILENT, Progress

_TOKENS = 128
"""Tokens that the paper's Fig. 3 draws."""


def compare_with_text(
    calibration: str | Path,
    model: str | Path,
    text: str,
    *,
    samples: int = 4,
    seqlen: int = 512,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> list[Consistency]:
    """Compare a calibration with what another text shows at every site.

    Args:
        calibration: its folder.
        model: what was calibrated.
        text: name or path of a text.
        samples: windows from the text's start.
        seqlen: tokens in each.
        device: where the model runs.
        progress: who is told.

    Raises:
        InputError: not this model's calibration, or a text that is too short.
    """
    found = read_calibration(calibration)
    checkpoint = open_checkpoint(model)
    refuse_beyond(checkpoint.config.max_position_embeddings, seqlen, checkpoint.name)
    source = load_text(text, "evaluation")
    windows = token_windows(source, checkpoint.load_tokenizer(), seqlen, samples, checkpoint.config.vocab_size)
    return measure_consistency(checkpoint, found, windows, device=device, progress=progress)


def choose_site(found: Sequence[Consistency], name: str | None) -> Consistency:
    """A site by name; without one the first, q of the first block, as in the paper.

    Raises:
        InputError: no such site; the nearest name is suggested.
    """
    names = [site.site for site in found]
    if name is None:
        return found[0]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
        raise InputError(f"--site {name}: no such site; did you mean {near[0] if near else names[0]}?")
    return found[names.index(name)]


def draw(site: Consistency, path: Path) -> None:
    """Draw upper thresholds of the first tokens, and centroids, normalised to [0, 1] as in Figs. 3 and 5.

    Args:
        site: what to draw.
        path: the picture; its suffix says of which kind (png, svg, pdf).

    Raises:
        InputError: matplotlib is not installed, a suffix that it does not know, or a folder that cannot be written to.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            'drawing needs matplotlib, which is not installed; run pip install "oasis-cli[plots]"'
        ) from None
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    if path.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise InputError(f"{path}: unknown kind of picture; let the name end in .png, .svg or .pdf")
    thresholds, centroids = figure.subplots(1, 2)
    online = site.online_upper[:_TOKENS]
    low, high = min(float(online.min()), site.offline[1]), max(float(online.max()), site.offline[1])
    span = high - low or 1.0
    thresholds.plot((online - low) / span, ".", label="online, each token's own")
    thresholds.axhline((site.offline[1] - low) / span, color="C1", label="offline, static")
    thresholds.set(xlabel="token", ylabel="upper threshold, normalised", title="Outlier thresholds")
    thresholds.legend()
    first, last = float(site.online_centroids[0]), float(site.online_centroids[-1])
    for values, marker, label in ((site.online_centroids, "o", "online"), (site.offline_centroids, "x", "offline")):
        centroids.plot((values - first) / (last - first or 1.0), marker, label=label)
    centroids.set(xlabel="centroid", ylabel="value of x / s, normalised", title="Centroids")
    centroids.legend()
    figure.suptitle(site.site, fontsize="small")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=150)
