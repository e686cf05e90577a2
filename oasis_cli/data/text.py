"""From the name of a text, as a user gives it, to its rows."""

from pathlib import Path

from oasis_cli.data.embedded import embedded_text
from oasis_cli.data.files import JSON_SUFFIXES, PARQUET_SUFFIXES, read_rows
from oasis_cli.data.hub import KNOWN, load_hub_text, parse_hub_id
from oasis_cli.data.source import Purpose, TextSource
from oasis_cli.errors import InputError
from oasis_cli.paths import user_path

EMBEDDED = "embedded"
_FILE_SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES, ".txt", ".text", ".raw", ".md", ".tokens")


def load_text(spec: str | Path | None, purpose: Purpose) -> TextSource:
    """Load the text that `spec` names.

    Args:
        spec: None or `embedded` (the part of the embedded text for this purpose); a known name (`wikitext2`, `ptb`,
            `c4`); a local file: plain text, JSON lines or Parquet; or a data set of the hub as
            `owner/name[:config[:split]]`. A local file wins over a data set of the hub that is called the same.
        purpose: known names and hub ids read `train` for calibration and `test` for evaluation (C4: `validation`).

    Returns:
        The rows. A plain text file has one row a line, newline included, and "" for a line of white space only: as the
        hub's WikiText does, so that joined rows give the text that quantization papers measure on.

    Raises:
        InputError: there is no such text, it cannot be read or reached, or it holds nothing but white space.
    """
    name = EMBEDDED if spec is None else str(spec)
    source = _load(name, purpose)
    if not any(document.strip() for document in source.documents):
        raise InputError(f"{name}: holds no text; give another file or data set")
    return source


def _load(name: str, purpose: Purpose) -> TextSource:
    if name == EMBEDDED:
        return embedded_text(purpose)
    if name in KNOWN:
        return load_hub_text(name, KNOWN[name][purpose], purpose)
    if _means_a_file(name):
        return TextSource(name, read_rows(user_path(name)))
    hub_text = parse_hub_id(name, purpose)
    if hub_text is None:
        known = ", ".join([EMBEDDED, *KNOWN])
        raise InputError(f"{name}: no such file, and not a known text ({known}) or a hub id (owner/name:config:split)")
    return load_hub_text(name, hub_text, purpose)


def _means_a_file(name: str) -> bool:
    """Whether it is there or looks like a path: then a missing file is said to be missing, not sought on the hub."""
    path = Path(name)
    if path.suffix.lower() in _FILE_SUFFIXES or path.is_absolute() or name.startswith(("~", ".")):
        return True
    try:
        return path.exists()
    except OSError:  # too long for a name, or a folder on the way that may not be searched
        return True
