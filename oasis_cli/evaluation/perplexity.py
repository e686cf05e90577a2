"""Perplexity, as the quantization papers measure it."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oasis_cli.data.windows import Windows
from oasis_cli.errors import InputError
from oasis_cli.progress import SILENT, Progress

logger = logging.getLogger(__name__)

_ROWS = 256  # logits widened to float32 at a time: 50 MB with a vocabulary of 49152


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of a model on a text, and all that is needed to measure it again.

    Attributes:
        value: exp(nll_mean).
        nll_mean: mean over all predicted tokens of -ln p(token | what precedes it in its window).
        stderr: standard error of `value` from the spread between windows; None for a single window.
        tokens: predicted tokens, (seqlen - 1) a window: its first token is given.
        windows: windows measured.
        seqlen: tokens in a window.
        bos: whether a beginning-of-sequence token stood before the text.
        data: name of the text.
        digest: `sha256:…` of the text.
        protocol: how the text was cut and the mean taken, in words.
    """

    value: float
    nll_mean: float
    stderr: float | None
    tokens: int
    windows: int
    seqlen: int
    bos: bool
    data: str
    digest: str
    protocol: str

    def to_json(self) -> dict[str, Any]:
        """The fields by name, ready for `json`."""
        return dict(vars(self))


def perplexity(logits: Callable[[Tensor], Tensor], windows: Windows, progress: Progress = SILENT) -> PerplexityResult:
    """Measure the perplexity of whatever yields logits.

    Args:
        logits: from tokens, int64 [1, T], to logits of any float type, [1, T, V], on any device.
        windows: what to measure on.
        progress: hears of each window.

    Raises:
        InputError: logits that are NaN or infinite where it matters; the message names the window.
        ValueError: logits of another shape than [1, T, V].
    """
    nll = torch.empty(len(windows.tokens), dtype=torch.float64)
    with torch.no_grad(), progress.task("perplexity", len(nll), "windows") as task:
        for index, tokens in enumerate(windows.tokens):
            scores = logits(tokens[None])
            nll[index] = _window_nll(scores, tokens)
            if not nll[index].exp().isfinite():
                raise InputError(
                    f"{windows.data}: window {index} gives logits that are NaN, infinite or beyond all measure; "
                    "the model is damaged or its number type too narrow"
                )
            task.advance()
    vocabulary = scores.shape[-1]
    result = _result(nll, windows)
    if result.value > vocabulary:
        logger.warning(
            "perplexity %.4g on %s is worse than guessing among %d tokens", result.value, windows.data, vocabulary
        )
    return result


def _window_nll(scores: Tensor, tokens: Tensor) -> Tensor:
    """Mean over the T - 1 predicted tokens, float64 []; float32 log-softmax, a few rows at a time."""
    if scores.dim() != 3 or scores.shape[:2] != (1, len(tokens)):
        raise ValueError(f"logits must be [1, {len(tokens)}, V], got {list(scores.shape)}")
    predictions, targets = scores[0, :-1], tokens[1:].to(scores.device)
    total = torch.zeros((), dtype=torch.float64)
    for rows, expected in zip(predictions.split(_ROWS), targets.split(_ROWS), strict=True):
        total += F.cross_entropy(rows.float(), expected, reduction="none").double().sum().cpu()
    return total / len(targets)


def _result(nll: Tensor, windows: Windows) -> PerplexityResult:
    mean = nll.mean().item()
    value = math.exp(mean)
    # d exp(m) = exp(m) dm; windows rather than tokens are the sample, since neighbouring tokens hang together
    stderr = value * nll.std().item() / math.sqrt(len(nll)) if len(nll) > 1 else None
    return PerplexityResult(
        value=value,
        nll_mean=mean,
        stderr=stderr,
        tokens=len(nll) * (windows.seqlen - 1),
        windows=len(nll),
        seqlen=windows.seqlen,
        bos=windows.bos,
        data=windows.data,
        digest=windows.digest,
        protocol=f"{windows.protocol}; exp of the mean negative log-likelihood of all tokens but each window's first",
    )
