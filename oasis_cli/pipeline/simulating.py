"""The simulate stage: timing of an image, and the bit-true walk through an image."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oasis_cli.compiler.verify import verify_image
from oasis_cli.data.text import load_text
from oasis_cli.data.windows import Windows, refuse_beyond, token_windows
from oasis_cli.errors import CheckError, InputError
from oasis_cli.evaluation.perplexity import PerplexityResult, perplexity
from oasis_cli.formats.image import open_image
from oasis_cli.formats.manifest import digest_file
from oasis_cli.formats.program import Opcode, Operation
from oasis_cli.hardware.target import load_target
from oasis_cli.models.checkpoint import load_tokenizer
from oasis_cli.pipeline.artifacts import image_file
from oasis_cli.pipeline.settings import SimulationSettings
from oasis_cli.progress import SILENT, Progress
from oasis_cli.runtime.linear import OasisLinear
from oasis_cli.runtime.loading import load
from oasis_cli.simulator.functional import FunctionalSimulator
from oasis_cli.simulator.report import SimulationReport
from oasis_cli.simulator.timing import simulate as time_program
from oasis_cli.simulator.units.pe_line import Engine


def simulate_image(
    image: str | Path, options: SimulationSettings, target: str | Path | None = None
) -> tuple[SimulationReport, str]:
    """Time the program of an image.

    Args:
        image: a compiled folder or a `model.oimg`.
        options: batch and lengths.
        target: another accelerator than the one that the image was compiled for.

    Returns:
        The report, and the image's digest.

    Raises:
        InputError: the image is damaged, or the lengths go beyond the model's positions.
    """
    opened = open_image(image_file(image), verify=True)
    metadata = opened.metadata()
    chosen = load_target(target or metadata.target.name)
    decode = options.decode_within(metadata.shape.max_positions)
    report = time_program(opened.program(), metadata.shape, chosen, options.batch, options.prefill, decode)
    return report, digest_file(opened.path)


@dataclass(frozen=True)
class Agreement:
    """How an image agrees with the quantized folder in torch.

    Attributes:
        layers: layer outputs compared, each on the same input bits.
        layer_error: greatest relative difference of a layer's output (norm-wise).
        index_flips: activation indices that differ on the same input bits.
        outlier_flips: channels marked as outliers by one of the two only.
        logits_error: greatest relative difference of a window's logits, end to end.
        kl_mean: mean KL divergence of the image's predictions from torch's, nats a token.
        perplexity: of torch, on the same windows.
    """

    layers: int
    layer_error: float
    index_flips: int
    outlier_flips: int
    logits_error: float
    kl_mean: float
    perplexity: float


@dataclass(frozen=True)
class FunctionalResult:
    """A bit-true run.

    Attributes:
        engine: how sums were found.
        perplexity: of the windows run.
        agreement: with the quantized folder; None where none was named.
    """

    engine: str
    perplexity: PerplexityResult
    agreement: Agreement | None = None

    def to_json(self) -> dict[str, Any]:
        """The `functional` entry of the result."""
        return {
            "engine": self.engine,
            "perplexity": [self.perplexity.to_json()],
            "agreement": asdict(self.agreement) if self.agreement else None,
        }


def run_functional(
    image: str | Path,
    *,
    text: str | Path | None = None,
    seqlen: int = 256,
    limit: int | None = 1,
    reference: str | Path | None = None,
    engine: Engine = "counted",
    progress: Progress = SILENT,
) -> FunctionalResult:
    """Run an image's program on real tokens and, given the quantized folder, compare every layer with torch.

    Args:
        image: a compiled folder or a `model.oimg` with its tokenizer beside it.
        text: what to run on; None takes the evaluation part of the text that comes with Python.
        seqlen: tokens in a window.
        limit: windows.
        reference: the quantized folder that the image was compiled from.
        engine: `counted` as the hardware does it, or `gathered`, faster; both give the same bits.
        progress: who is told.

    Raises:
        InputError: the image or the reference is damaged, they do not belong together, the text is too short, or a
            window is longer than the model's positions.
    """
    path = image_file(image)
    watch = None
    if reference is not None:
        watch = _Watch(_load_reference(path, reference, progress))
    simulator = FunctionalSimulator(path, engine=engine, observer=watch, progress=progress)
    shape = simulator.metadata.shape
    refuse_beyond(shape.max_positions, seqlen, path.parent.name)
    windows = token_windows(load_text(text, "evaluation"), load_tokenizer(path.parent), seqlen, limit, shape.vocab)
    kept: list[Tensor] = []

    def logits(tokens: Tensor) -> Tensor:
        found = simulator.logits(tokens)
        if watch is not None:
            kept.append(found)
        return found

    measured = perplexity(logits, windows, progress)
    agreement = watch.compare(windows, kept, progress) if watch is not None else None
    return FunctionalResult(engine, measured, agreement)


def _load_reference(image: Path, reference: str | Path, progress: Progress) -> PreTrainedModel:
    """The quantized folder as a model, once the image is known to come from it."""
    try:
        verify_image(image, reference, progress)
    except CheckError as error:
        raise InputError(f"{error}; name the folder that it was compiled from with --reference") from error
    return load(reference)


class _Watch:
    """Sees every operation of the image and does the same in torch, on the same input bits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._inputs: dict[int, Tensor] = {}
        self.layers = 0
        self.layer_error = 0.0
        self.index_flips = 0
        self.outlier_flips = 0

    def __call__(self, op: Operation, seen: dict[str, Tensor]) -> None:
        if op.opcode is Opcode.QUANTIZE:
            self._inputs[op.destination] = seen["input"]
        elif op.opcode is Opcode.LUT_GEMM:
            self._compare_layer(op, seen)

    def _compare_layer(self, op: Operation, seen: dict[str, Tensor]) -> None:
        layer = self._model.get_submodule(op.name)
        if not isinstance(layer, OasisLinear):
            raise ValueError(f"{op.name} is not quantized in the reference")
        x = self._inputs[op.sources[0]]
        act = layer.quantize_activations(x)
        self.index_flips += int((act.index != seen["input.index"]).sum())
        self.outlier_flips += int((act.outliers != seen["input.outliers"]).sum())
        self.layer_error = max(self.layer_error, _relative(seen["output"], layer(x)))
        self.layers += 1

    @torch.no_grad()
    def compare(self, windows: Windows, kept: Sequence[Tensor], progress: Progress) -> Agreement:
        """End to end, on the same windows."""
        errors, divergences, remaining = [], [], iter(kept)

        def logits(tokens: Tensor) -> Tensor:
            theirs: Tensor = self._model(input_ids=tokens, use_cache=False).logits
            ours = next(remaining)
            errors.append(_relative(ours, theirs))
            p, q = theirs[0].double().log_softmax(-1), ours[0].double().log_softmax(-1)
            divergences.append(float((p.exp() * (p - q)).sum(-1).mean()))
            return theirs

        measured = perplexity(logits, windows, progress)
        return Agreement(
            layers=self.layers,
            layer_error=self.layer_error,
            index_flips=self.index_flips,
            outlier_flips=self.outlier_flips,
            logits_error=max(errors),
            kl_mean=max(0.0, sum(divergences) / len(divergences)),
            perplexity=measured.value,
        )


def _relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm expected; 0 where both are equal, also at zero."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm()) if difference else 0.0
