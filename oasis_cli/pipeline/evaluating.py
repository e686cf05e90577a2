"""The eval stage: perplexity of an original, a quantized folder or an image, all by the same lines of code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oasis_cli.data.source import TextSource
from oasis_cli.data.text import load_text
from oasis_cli.data.windows import Windows, refuse_beyond, token_windows
from oasis_cli.errors import InputError
from oasis_cli.evaluation.perplexity import PerplexityResult, perplexity
from oasis_cli.formats.manifest import digest_file
from oasis_cli.models.checkpoint import load_tokenizer, open_checkpoint
from oasis_cli.pipeline.artifacts import Kind, image_file, kind_of
from oasis_cli.pipeline.settings import EvaluationSettings
from oasis_cli.progress import SILENT, Progress
from oasis_cli.runtime.loading import load
from oasis_cli.simulator.functional import FunctionalSimulator


@dataclass(frozen=True)
class Opened:
    """Something that yields logits.

    Attributes:
        kind: what it is.
        name: what to call it.
        digest: of its weights.
        logits: from tokens, int64 [1, T], to [1, T, vocabulary].
        tokenizer: of transformers.
        vocabulary: tokens that the model knows.
        positions: longest window.
    """

    kind: Kind
    name: str
    digest: str
    logits: Callable[[Tensor], Tensor]
    tokenizer: Any
    vocabulary: int
    positions: int | None


def open_logits(target: str | Path, device: str = "cpu", progress: Progress = SILENT) -> Opened:
    """Open a model, a quantized folder or an image for evaluation.

    Raises:
        InputError: it is something else, or damaged.
    """
    kind = kind_of(target)
    if kind is Kind.IMAGE:
        return _open_image(image_file(target), progress)
    if kind is Kind.CALIBRATION:
        raise InputError(f"{target}: a calibration yields no logits; name a model, a quantized folder or an image")
    if kind in (Kind.QUANTIZED, Kind.BASELINE):
        checkpoint = open_checkpoint(target)
        model = load(target, device=device)
    else:
        checkpoint = open_checkpoint(target)
        model = checkpoint.load_model(device=device, progress=progress)
    return Opened(
        kind=kind,
        name=checkpoint.name,
        digest=checkpoint.digest,
        logits=lambda tokens: model(input_ids=tokens.to(device), use_cache=False).logits,
        tokenizer=checkpoint.load_tokenizer(),
        vocabulary=model.get_input_embeddings().weight.shape[0],
        positions=getattr(model.config, "max_position_embeddings", None),
    )


def _open_image(path: Path, progress: Progress) -> Opened:
    simulator = FunctionalSimulator(path, engine="gathered", progress=progress)
    shape = simulator.metadata.shape
    return Opened(
        kind=Kind.IMAGE,
        name=path.parent.name,
        digest=digest_file(path),
        logits=simulator.logits,
        tokenizer=load_tokenizer(path.parent),
        vocabulary=shape.vocab,
        positions=shape.max_positions,
    )


@dataclass(frozen=True)
class EvaluationResult:
    """Perplexities of one target.

    Attributes:
        target: its name.
        kind: what it is.
        digest: of its weights.
        perplexities: one a text.
        reference: name and digest of what it was compared with; None without.
    """

    target: str
    kind: str
    digest: str
    perplexities: tuple[PerplexityResult, ...]
    reference: tuple[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """The `perplexity` entry of the result, with what it was measured on, and `against`: means over all texts."""
        return {
            "target": self.target,
            "kind": self.kind,
            "perplexity": [found.to_json() for found in self.perplexities],
            "against": self._against(),
        }

    def _against(self) -> dict[str, Any] | None:
        if self.reference is None:
            return None
        tokens = sum(found.tokens for found in self.perplexities)
        compared = [(found.tokens / tokens, found.against) for found in self.perplexities if found.against]
        return {
            "target": self.reference[0],
            "kl_mean": sum(share * found.kl_mean for share, found in compared),
            "kl_max": max(found.kl_max for _, found in compared),
            "top1_agreement": sum(share * found.top1_agreement for share, found in compared),
        }

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of everything that went in."""
        against = {} if self.reference is None else {"against": self.reference[1]}
        return {"model": self.digest} | against | {found.data: found.digest for found in self.perplexities}


def evaluate(
    target: str | Path,
    options: EvaluationSettings,
    *,
    against: str | Path | None = None,
    device: str = "cpu",
    progress: Progress = SILENT,
) -> EvaluationResult:
    """Measure perplexity, as the quantization papers do, and how far predictions lie from another model's.

    Args:
        target: a model (folder, GGUF file, hub id), a quantized folder or an image.
        options: texts, window length and limit.
        against: what to compare with, of any of these kinds; None leaves that out.
        device: where a model runs; images are simulated on the CPU.
        progress: who is told.

    Raises:
        InputError: a text shorter than a window, a window longer than the model's positions, logits not finite, a
            reference that cuts texts into other tokens.
    """
    sources = load_texts(options)
    opened = open_logits(target, device, progress)
    refuse_beyond(opened.positions, options.seqlen, opened.name)
    windows = cut_windows(sources, options, opened.tokenizer, opened.vocabulary)
    reference = None if against is None else open_logits(against, device, progress)
    if reference is not None:
        _refuse_other_tokens(
            opened, reference, windows, cut_windows(sources, options, reference.tokenizer, reference.vocabulary)
        )
    logits, origin = (None, None) if reference is None else (reference.logits, (reference.name, reference.digest))
    found = tuple(perplexity(opened.logits, each, progress, logits) for each in windows)
    return EvaluationResult(opened.name, opened.kind.value, opened.digest, found, origin)


def _refuse_other_tokens(one: Opened, other: Opened, windows: list[Windows], others: list[Windows]) -> None:
    refuse_beyond(other.positions, windows[0].seqlen, other.name)
    same = one.vocabulary == other.vocabulary and all(
        torch.equal(first.tokens, second.tokens) for first, second in zip(windows, others, strict=True)
    )
    if not same:
        raise InputError(
            f"{other.name}: cuts the text into other tokens than {one.name}; "
            "compare with a model of the same tokenizer and vocabulary"
        )


def load_texts(options: EvaluationSettings) -> list[TextSource]:
    """The texts to measure on.

    Raises:
        InputError: one is not there, or holds nothing.
    """
    return [load_text(name, "evaluation") for name in options.ppl or (None,)]


def cut_windows(
    sources: Sequence[TextSource], options: EvaluationSettings, tokenizer: Any, vocabulary: int
) -> list[Windows]:
    """The windows of every text.

    Raises:
        InputError: a text is shorter than a window.
    """
    return [token_windows(source, tokenizer, options.seqlen, options.limit, vocabulary) for source in sources]
