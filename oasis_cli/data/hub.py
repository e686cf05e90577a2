"""Rows of text from the Hugging Face hub, through the `datasets` library and its cache."""

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from oasis_cli.data.files import checked_text, text_field
from oasis_cli.data.source import ROW_SEPARATOR, Purpose, TextSource
from oasis_cli.errors import InputError

CALIBRATION_CHARACTERS = 2**25
"""Calibration reads no further into a data set: 128 samples of 2048 tokens are about a million characters."""


@dataclass(frozen=True)
class HubText:
    """Where a text lies on the hub.

    Attributes:
        path: `owner/name`, or the name of a loader such as `parquet`.
        split: the split to read.
        config: the data set's configuration, if it has several.
        file: the file that holds the split, where the data set has many more.
        separator: what joins the rows.
        rows: how many rows are read, from the first on; None reads all.
    """

    path: str
    split: str
    config: str | None = None
    file: str | None = None
    separator: str = ROW_SEPARATOR
    rows: int | None = None


# PTB's own repository holds a loading script, which `datasets` no longer runs; this branch holds its output.
_PTB = "hf://datasets/ptb-text-only/ptb_text_only@refs%2Fconvert%2Fparquet/penn_treebank/{split}/0000.parquet"
_C4 = "allenai/c4"
_C4_TRAIN, _C4_VALIDATION = "en/c4-train.00000-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz"
_WIKITEXT, _WIKITEXT_2 = "Salesforce/wikitext", "wikitext-2-raw-v1"

# Splits, joins and row counts as in GPTQ's evaluation (its wikitext2, ptb-new and c4-new), which its followers kept.
KNOWN: dict[str, dict[Purpose, HubText]] = {
    "wikitext2": {
        "calibration": HubText(_WIKITEXT, "train", _WIKITEXT_2),
        "evaluation": HubText(_WIKITEXT, "test", _WIKITEXT_2),
    },
    "ptb": {
        "calibration": HubText("parquet", "train", file=_PTB.format(split="train"), separator=" "),
        "evaluation": HubText("parquet", "test", file=_PTB.format(split="test"), separator=" "),
    },
    "c4": {
        "calibration": HubText(_C4, "train", file=_C4_TRAIN),
        "evaluation": HubText(_C4, "validation", file=_C4_VALIDATION, separator=" ", rows=1100),
    },
}

_HUB_ID = re.compile(r"(?P<path>\w[\w.-]*/\w[\w.-]*)(:(?P<config>[\w.-]*)(:(?P<split>\w[\w.-]*))?)?", re.ASCII)


def parse_hub_id(spec: str, purpose: Purpose) -> HubText | None:
    """Read `owner/name[:config[:split]]`; None if `spec` is nothing of the kind.

    Without a split, calibration reads `train` and evaluation reads `test`.
    """
    match = _HUB_ID.fullmatch(spec)
    if match is None:
        return None
    split = match["split"] or ("train" if purpose == "calibration" else "test")
    return HubText(match["path"], split, match["config"] or None)


def load_hub_text(name: str, text: HubText, purpose: Purpose) -> TextSource:
    """Fetch a data set, or take it from the cache of `datasets`.

    Raises:
        InputError: the hub cannot be reached, or has no such data set, configuration, split or field.
    """
    data = _load_dataset(name, text)
    column = text_field(data.column_names, _string_columns(data), where=name)
    values = enumerate(islice(data[column], text.rows), start=1)
    rows = (checked_text(value, column, where=f"{name}, record {number}") for number, value in values)
    taken = _up_to(CALIBRATION_CHARACTERS, rows) if purpose == "calibration" else rows
    return TextSource(name, tuple(taken), text.separator)


def _load_dataset(name: str, text: HubText) -> Any:
    import datasets  # takes a second to import, and most texts are local
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its client's, which it may let through

    files = {text.split: text.file} if text.file else None
    try:
        with _quiet_hub():
            return datasets.load_dataset(text.path, text.config, data_files=files, split=text.split)
    except (OSError, ValueError, RuntimeError, HTTPError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{name}: cannot be read from the Hugging Face hub ({reason}); "
            "give the path of a local file instead (.txt, .jsonl or .parquet)"
        ) from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """The hub's client logs each of its attempts; the error that ends them says it all."""
    loggers = [logging.getLogger("huggingface_hub"), logging.getLogger("datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _string_columns(data: Any) -> list[str]:
    kinds = {name: getattr(feature, "dtype", None) for name, feature in data.features.items()}
    return [name for name, kind in kinds.items() if kind in ("string", "large_string")]


def _up_to(characters: int, rows: Iterable[str]) -> Iterator[str]:
    """The first rows, up to the one that brings them to so many characters."""
    taken = 0
    for row in rows:
        yield row
        taken += len(row)
        if taken >= characters:
            return
