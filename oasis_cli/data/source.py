"""The text that a calibration or an evaluation reads, before any tokenizer has seen it."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Purpose = Literal["calibration", "evaluation"]

ROW_SEPARATOR = "\n\n"
"""What the quantization papers put between the rows of a data set before they tokenize it."""


@dataclass(frozen=True)
class TextSource:
    """Rows of text and how they are joined.

    Attributes:
        name: how reports call it: a data set's name or a path as the user gave it.
        documents: the rows, in order; a row may be empty.
        separator: stands between two rows in `text`.
    """

    name: str
    documents: tuple[str, ...]
    separator: str = ROW_SEPARATOR

    @cached_property
    def text(self) -> str:
        """The rows as the one string that is tokenized."""
        return self.separator.join(self.documents)

    @cached_property
    def digest(self) -> str:
        """`sha256:…` of `text` in UTF-8: equal text has an equal digest, wherever it came from."""
        return "sha256:" + hashlib.sha256(self.text.encode()).hexdigest()
