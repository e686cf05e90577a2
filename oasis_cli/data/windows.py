"""Windows of tokens: what a model is calibrated and evaluated on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oasis_cli.data.source import TextSource
from oasis_cli.errors import InputError


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of equal length that do not overlap, out of one text tokenized once.

    Attributes:
        tokens: int64 [n, seqlen].
        total_tokens: tokens of the whole text, the beginning-of-sequence token included.
        bos: whether the tokenizer put a beginning-of-sequence token before the text (before the first window only).
        data: name of the text.
        digest: `sha256:…` of the text.
        separator: what joined the rows of the text.
    """

    tokens: Tensor
    total_tokens: int
    bos: bool
    data: str
    digest: str
    separator: str

    @property
    def seqlen(self) -> int:
        """Tokens in a window."""
        return self.tokens.shape[1]

    @property
    def protocol(self) -> str:
        """How the windows came about, for reports."""
        return (
            f"rows joined by {self.separator!r}, tokenized once as the tokenizer does by default "
            f"({'with' if self.bos else 'without'} a beginning-of-sequence token), "
            f"windows of {self.seqlen} tokens that do not overlap"
        )


def refuse_beyond(positions: int | None, seqlen: int, name: str, cure: str = "--seqlen") -> None:
    """Refuse windows that are longer than a model's positions.

    Args:
        positions: the longest sequence that the model was made for; None where it does not say.
        seqlen: tokens in a window.
        name: the model's, for the message.
        cure: what a shorter length is given with.

    Raises:
        InputError: as said.
    """
    _require(
        positions is None or seqlen <= positions,
        f"{name}: has {positions} positions, fewer than the seqlen of {seqlen}; take a shorter {cure}",
    )


def token_windows(
    source: TextSource, tokenizer: Any, seqlen: int, limit: int | None = None, vocab_size: int | None = None
) -> Windows:
    """Cut a text into windows from its start; a rest shorter than a window is left out.

    Args:
        source: the text.
        tokenizer: a tokenizer of transformers; called without options, as the quantization papers do.
        seqlen: tokens in a window, at least 2.
        limit: take only so many windows; None takes all.
        vocab_size: what the model's embedding holds; a token beyond it is refused.

    Raises:
        InputError: the text is shorter than a window, or a token lies outside the vocabulary.
    """
    _require(limit is None or limit > 0, f"limit: {limit} windows asked for; at least 1 is needed")
    stream, bos = encode(source, tokenizer, vocab_size)
    available = _count_windows(source, stream, seqlen)
    return _windows(source, stream, bos, seqlen, torch.arange(min(limit or available, available)))


def calibration_windows(
    source: TextSource, tokenizer: Any, samples: int, seqlen: int, seed: int, vocab_size: int | None = None
) -> Windows:
    """Draw `samples` different windows at random, in the order drawn.

    The draw uses a generator of its own and depends on nothing but `seed` and the number of windows that the text has;
    with the same seed, fewer samples are the first ones of more.

    Args:
        source: the text, whose documents form one stream.
        tokenizer: a tokenizer of transformers.
        samples: how many windows.
        seqlen: tokens in a window, at least 2.
        seed: of the draw, from 0 to 2**63 - 1.
        vocab_size: what the model's embedding holds; a token beyond it is refused.

    Raises:
        InputError: the text has fewer windows than `samples`, or a token lies outside the vocabulary.
    """
    _require(samples > 0, f"samples: {samples} asked for; at least 1 is needed")
    _require(0 <= seed < 2**63, f"seed: {seed} is not between 0 and 2**63 - 1")
    stream, bos = encode(source, tokenizer, vocab_size)
    available = _count_windows(source, stream, seqlen)
    _require(
        samples <= available,
        f"{source.name}: {samples} samples of {seqlen} tokens asked for, but its {len(stream)} tokens give "
        f"{available}; take a longer text, fewer samples or a shorter seqlen",
    )
    drawn = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:samples]
    return _windows(source, stream, bos, seqlen, drawn)


def encode(source: TextSource, tokenizer: Any, vocab_size: int | None = None) -> tuple[Tensor, bool]:
    """Tokenize a text.

    Args:
        source: the text.
        tokenizer: a tokenizer of transformers; called without options.
        vocab_size: what the model's embedding holds; None where that is not known.

    Returns:
        The tokens, int64 [T], and whether the first is a beginning-of-sequence token that the tokenizer added.

    Raises:
        InputError: a token lies outside the vocabulary.
    """
    # verbose=False: no warning that the text is longer than the model's context, for it is cut into windows
    ids: list[int] = tokenizer(source.text, verbose=False)["input_ids"]
    highest = max(ids, default=0)
    if vocab_size is not None and highest >= vocab_size:
        raise InputError(
            f"{source.name}: the tokenizer gives token {highest}, but the model knows only {vocab_size} tokens; "
            "use the tokenizer that belongs to the model"
        )
    return torch.tensor(ids, dtype=torch.int64), adds_bos(tokenizer)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer by default begins a text with its beginning-of-sequence token."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def _count_windows(source: TextSource, stream: Tensor, seqlen: int) -> int:
    _require(seqlen >= 2, f"seqlen: {seqlen} asked for; at least 2 tokens are needed")
    _require(
        len(stream) >= seqlen,
        f"{source.name}: its {len(stream)} tokens are fewer than the seqlen of {seqlen}; "
        "take a longer text or a shorter seqlen",
    )
    return len(stream) // seqlen


def _windows(source: TextSource, stream: Tensor, bos: bool, seqlen: int, chosen: Tensor) -> Windows:
    tokens = stream[: len(stream) // seqlen * seqlen].view(-1, seqlen)[chosen]
    return Windows(tokens, len(stream), bos, source.name, source.digest, source.separator)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)
