"""Perplexity, as the quantization papers measure it, and how far one model's predictions lie from another's."""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oasis_cli.data.windows import Windows
from oasis_cli.errors import InputError
from oasis_cli.progress import SILENT, Progress

logger = logging.getLogger(__name__)

Logits = Callable[[Tensor], Tensor]
"""From tokens, int64 [1, T], to logits of any float type, [1, T, V], on any device."""

_ROWS = 256  # logits widened to float32 at a time: 50 MB with a vocabulary of 49152


@dataclass(frozen=True)
class Divergence:
    """How far a model's predictions lie from a reference's on the same tokens.

    Attributes:
        kl_mean: mean over all predicted tokens of KL(reference || model), in nats.
        kl_stderr: its standard error from the spread between windows; None for a single window.
        kl_max: of the worst token.
        top1_agreement: share of tokens for which both hold the same token most likely.
        perplexity: the reference's.
        ratio: the model's perplexity over the reference's.
        ratio_stderr: standard error of `ratio`; windows are paired, so that what makes a window hard for both cancels.
    """

    kl_mean: float
    kl_stderr: float | None
    kl_max: float
    top1_agreement: float
    perplexity: float
    ratio: float
    ratio_stderr: float | None


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
        window_nll: the mean of each window, from which two models are compared window by window.
        against: how far the predictions lie from a reference's; None without one.
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
    window_nll: tuple[float, ...]
    against: Divergence | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields by name, ready for `json`."""
        return asdict(self)


@dataclass(frozen=True)
class WindowScore:
    """What one window gives.

    Attributes:
        nll: mean over its T - 1 predicted tokens of -ln p(token), in nats.
        reference_nll: the reference's; NaN without one, as the rest.
        kl_mean: mean of KL(reference || model).
        kl_max: of the worst token.
        agreement: share of tokens with the same most likely token.
    """

    nll: float
    reference_nll: float = math.nan
    kl_mean: float = math.nan
    kl_max: float = math.nan
    agreement: float = math.nan


def score_window(scores: Tensor, tokens: Tensor, reference: Tensor | None = None) -> WindowScore:
    """Measure one window in float32, a few rows at a time, summed in float64.

    Args:
        scores: the model's logits, [1, T, V].
        tokens: int64 [T].
        reference: another model's logits for the same tokens, [1, T, V].

    Raises:
        ValueError: logits of another shape.
    """
    for logits in (scores, reference):
        if logits is not None and (logits.dim() != 3 or logits.shape[:2] != (1, len(tokens))):
            raise ValueError(f"logits must be [1, {len(tokens)}, V], got {list(logits.shape)}")
    count = len(tokens) - 1
    totals = torch.zeros(4, dtype=torch.float64)  # nll, the reference's, KL, agreement
    worst = -math.inf
    for start in range(0, count, _ROWS):
        rows = slice(start, min(start + _ROWS, count))
        own = scores[0, rows].float()
        expected = tokens[1:][rows].to(own.device)
        totals[0] += F.cross_entropy(own, expected, reduction="none").double().sum().cpu()
        if reference is not None:
            other = reference[0, rows].float()
            totals[1] += F.cross_entropy(other, expected.to(other.device), reduction="none").double().sum().cpu()
            ours, theirs = own.log_softmax(dim=-1), other.to(own.device).log_softmax(dim=-1)
            divergence = F.kl_div(ours, theirs, reduction="none", log_target=True).double().sum(dim=-1)
            totals[2] += divergence.sum().cpu()
            totals[3] += (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum().cpu()
            worst = max(worst, float(divergence.max()))
    nll, reference_nll, kl_mean, agreement = (totals / count).tolist()
    return WindowScore(nll) if reference is None else WindowScore(nll, reference_nll, kl_mean, worst, agreement)


def perplexity(
    logits: Logits, windows: Windows, progress: Progress = SILENT, reference: Logits | None = None
) -> PerplexityResult:
    """Measure the perplexity of whatever yields logits.

    Args:
        logits: of the model.
        windows: what to measure on.
        progress: hears of each window.
        reference: of the model to compare with, window by window; None leaves the comparison out.

    Raises:
        InputError: logits that are NaN or infinite where it matters; the message names the window.
        ValueError: logits of another shape than [1, T, V].
    """
    found: list[WindowScore] = []
    with torch.no_grad(), progress.task("perplexity", len(windows.tokens), "windows") as task:
        for index, tokens in enumerate(windows.tokens):
            scores = logits(tokens[None])
            found.append(score_window(scores, tokens, None if reference is None else reference(tokens[None])))
            if not _sound(found[-1], reference is not None):
                raise InputError(
                    f"{windows.data}: window {index} gives logits that are NaN, infinite or beyond all measure; "
                    "the model is damaged or its number type too narrow"
                )
            task.advance()
    result = summarise(found, windows)
    if result.value > scores.shape[-1]:
        logger.warning(
            "perplexity %.4g on %s is worse than guessing among %d tokens", result.value, windows.data, scores.shape[-1]
        )
    return result


def _sound(score: WindowScore, compared: bool) -> bool:
    numbers = (score.nll, score.reference_nll, score.kl_mean) if compared else (score.nll,)
    return all(math.isfinite(number) and number < math.log(torch.finfo(torch.float64).max) for number in numbers)


def summarise(scores: list[WindowScore], windows: Windows) -> PerplexityResult:
    """The result that the windows' scores amount to; windows are of one length, so that their means count alike.

    Args:
        scores: of the first windows, one at least.
        windows: what was measured on.
    """
    nll = torch.tensor([score.nll for score in scores], dtype=torch.float64)
    value = math.exp(nll.mean().item())
    return PerplexityResult(
        value=value,
        nll_mean=nll.mean().item(),
        # d exp(m) = exp(m) dm; windows rather than tokens are the sample, since neighbouring tokens hang together
        stderr=_scaled(value, _standard_error(nll)),
        tokens=len(nll) * (windows.seqlen - 1),
        windows=len(nll),
        seqlen=windows.seqlen,
        bos=windows.bos,
        data=windows.data,
        digest=windows.digest,
        protocol=f"{windows.protocol}; exp of the mean negative log-likelihood of all tokens but each window's first",
        window_nll=tuple(nll.tolist()),
        against=None if math.isnan(scores[0].kl_mean) else _divergence(scores, nll),
    )


def _divergence(scores: list[WindowScore], nll: Tensor) -> Divergence:
    other, kl = (
        torch.tensor([getattr(score, name) for score in scores], dtype=torch.float64)
        for name in ("reference_nll", "kl_mean")
    )
    ratio = math.exp((nll - other).mean().item())
    return Divergence(
        kl_mean=kl.mean().item(),
        kl_stderr=_standard_error(kl),
        kl_max=max(score.kl_max for score in scores),
        top1_agreement=sum(score.agreement for score in scores) / len(scores),
        perplexity=math.exp(other.mean().item()),
        ratio=ratio,
        ratio_stderr=_scaled(ratio, _standard_error(nll - other)),
    )


def _standard_error(sample: Tensor) -> float | None:
    return sample.std().item() / math.sqrt(len(sample)) if len(sample) > 1 else None


def _scaled(value: float, error: float | None) -> float | None:
    return None if error is None else value * error
