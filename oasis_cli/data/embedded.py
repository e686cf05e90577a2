"""English text that every CPython carries, so that the tool can be tried without files or network.

`pydoc_data.topics` holds the chapters of the language reference that `help()` shows. Its topics overlap
("with" is a section of "compound"), so a split by topics alone would evaluate on text that was calibrated on.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping

from oasis_cli.data.source import Purpose, TextSource
from oasis_cli.errors import InputError

_EVALUATION_TENTHS = 3
# Shorter paragraphs, such as a line of grammar or ">>> x", recur in texts that have nothing else in common.
_LONG_PARAGRAPH = 60


def embedded_text(purpose: Purpose) -> TextSource:
    """The calibration or the evaluation part of the embedded text: about 260 and 115 thousand characters.

    A topic belongs to the same part under every Python. No paragraph of 60 characters or more occurs twice, be it
    within a part or across both. Newer Pythons carry more text: the digest says which text it was.

    Raises:
        InputError: this Python was stripped of its help.
    """
    try:
        from pydoc_data.topics import topics  # half a megabyte: only for whoever wants the text
    except ImportError as error:
        raise InputError("embedded: this Python lacks pydoc_data; give a text file instead") from error
    return TextSource(f"embedded ({purpose} part)", split_topics(topics)[purpose])


def split_topics(topics: Mapping[str, str]) -> dict[Purpose, tuple[str, ...]]:
    """The documents of each part, topics in the order of their names.

    A paragraph that several topics share stays in the first of them, and in the calibration part before the
    evaluation part: so what is calibrated on never depends on what is evaluated on.
    """
    names: dict[Purpose, list[str]] = {"calibration": [], "evaluation": []}
    for name in sorted(topics):
        names[topic_part(name)].append(name)
    seen: set[str] = set()
    return {part: _documents((topics[name] for name in members), seen) for part, members in names.items()}


def topic_part(name: str) -> Purpose:
    """The part that a topic belongs to, by a hash of its name."""
    tenth = int(hashlib.sha256(f"oasis:{name}".encode()).hexdigest(), 16) % 10
    return "evaluation" if tenth < _EVALUATION_TENTHS else "calibration"


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, which blank lines part."""
    return [paragraph for paragraph in re.split(r"\n[ \t]*\n", text.strip("\n")) if paragraph.strip()]


def _documents(texts: Iterable[str], seen: set[str]) -> tuple[str, ...]:
    """The texts without what was `seen` before; what they add is put into `seen`."""
    documents = []
    for text in texts:
        fresh = [paragraph for paragraph in paragraphs(text) if _is_fresh(paragraph, seen)]
        if fresh:
            documents.append("\n\n".join(fresh))
    return tuple(documents)


def _is_fresh(paragraph: str, seen: set[str]) -> bool:
    words = " ".join(paragraph.split())
    if len(words) < _LONG_PARAGRAPH:
        return True
    if words in seen:
        return False
    seen.add(words)
    return True
