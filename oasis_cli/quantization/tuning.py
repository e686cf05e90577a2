"""Tuning the whole model by gradient: what it gives out comes nearer to the original, in the very same format.

Scales of output channels, codebooks of weights and of sites, and the norms' own weights move; indices stay. What falls
is the divergence KL(original || quantized) of the next token's distribution on the calibration text, with activations
quantized as the runtime does it. Self-distillation needs few tokens, since every one comes with a whole distribution.
"""

import copy
import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from oasis_cli.errors import InputError
from oasis_cli.formats.tensors import save_tensors
from oasis_cli.progress import Progress
from oasis_cli.quantization.fake_quant import TunedCodebook, TunedLinear, TunedSite
from oasis_cli.quantization.methods import Job, StoredLayer

_HEAD_ROWS: Final = 64
"""Tokens whose logits are held at once; more would not fit a CPU's cache."""
_BETAS: Final = (0.9, 0.95)
_WARM_UP: Final = 4
_CODEBOOK_SHARE: Final = 0.5
_LARGEST_HALF: Final = 65504.0


@dataclass(frozen=True)
class Tuned:
    """What tuning found.

    Attributes:
        tensors: what replaces the tensors of the same names in the folder.
        report: steps, divergence before and after on the same sequences, seconds.
    """

    tensors: Mapping[str, Tensor]
    report: Mapping[str, Any]

    def save(self, path: Path, run: str) -> None:
        """Write it down, so that an interrupted run need not tune again.

        Args:
            path: the file.
            run: digest of inputs and settings.
        """
        metadata = {"run": run, "report": json.dumps(self.report)}
        save_tensors(path, {name: tensor.contiguous() for name, tensor in self.tensors.items()}, metadata)

    @classmethod
    def load(cls, path: Path, run: str) -> "Tuned | None":
        """What an interrupted run of the same inputs and settings left, if anything."""
        try:
            with safe_open(path, "pt") as file:
                kept = file.metadata() or {}
                if kept.get("run") != run:
                    return None
                return cls({name: file.get_tensor(name) for name in file.keys()}, json.loads(kept["report"]))  # noqa: SIM118 - not a dict
        except (OSError, SafetensorError):
            return None


def tune(job: Job, layers: Mapping[str, StoredLayer], progress: Progress) -> Tuned:
    """Tune a quantized model.

    Args:
        job: of the stage.
        layers: every quantized layer.
        progress: who is told.

    Raises:
        InputError: the divergence is not finite.
    """
    started = time.monotonic()
    options, tokens = job.options, job.calibration.tokens
    seqlen = min(options.tune_seqlen, tokens.shape[1])
    sequences = tokens[:, : tokens.shape[1] // seqlen * seqlen].reshape(-1, seqlen)
    batch = min(options.tune_batch, len(sequences))
    steps = max(1, round(options.tune_epochs * len(sequences) / batch))
    student, sites = _student(job, layers)
    loss_of = _Divergence(job.model, sequences, progress)
    groups = list(_parameter_groups(student, options.tune_rate))
    optimizer = torch.optim.Adam(groups, betas=_BETAS)
    probe = list(range(batch))  # always the same sequences, since they differ more than tuning moves them
    before = loss_of.measure(student, probe)
    with progress.task("tuning", steps, "steps") as task:
        for step, chosen in zip(range(steps), _batches(len(sequences), batch, options.seed), strict=False):
            share = min(1.0, (step + 1) / _WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * share
            optimizer.zero_grad()
            loss = loss_of(student, chosen)
            loss.backward()
            for site in sites.values():
                site.forget()
            if not math.isfinite(loss.item()):
                raise InputError(
                    f"tuning: the divergence from the original is not finite at step {step + 1}; "
                    "take a smaller tune_rate, or tune_epochs=0"
                )
            optimizer.step()
            task.advance()
    report = {
        "steps": steps,
        "divergence_before": before,
        "divergence_after": loss_of.measure(student, probe),
        "seconds": time.monotonic() - started,
    }
    return Tuned(_collect(job, student), report)


def _compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it fast: products of tuning need no more."""
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16


def _student(job: Job, layers: Mapping[str, StoredLayer]) -> tuple[PreTrainedModel, dict[str, TunedSite]]:
    """The model with its quantized layers replaced by ones that can be tuned, in float32."""
    originals = {name: job.model.get_submodule(name) for name in layers}
    memo = {id(layer): layer for layer in originals.values()}  # not copied: they are replaced
    student = copy.deepcopy(job.model, memo).requires_grad_(False)
    device = job.model.device
    sites: dict[str, TunedSite] = {}
    for name, layer in layers.items():
        site = job.spec.layers[name].site
        if site not in sites:
            sites[site] = TunedSite(job.activation_format(site, layer.act_codebook), device, _compute_dtype(device))
        parent, _, leaf = name.rpartition(".")
        bias = originals[name].bias
        tuned = TunedLinear(layer.weight, bias, sites[site], device)
        setattr(student.get_submodule(parent), leaf, tuned)
    return student.float(), sites


def _parameter_groups(student: nn.Module, rate: float) -> Iterator[dict[str, Any]]:
    """What moves, and how fast; of norms, whose weights are of order one, as much as of codebooks."""
    tuned = [module for module in student.modules() if isinstance(module, TunedLinear)]
    codebooks = [module.moved for module in student.modules() if isinstance(module, TunedCodebook)]
    norms = [parameter for _, parameter in _norms(student)]
    yield {"params": [layer.growth for layer in tuned], "rate": rate, "lr": rate}
    for parameters in (codebooks, norms):
        if parameters:
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield {"params": parameters, "rate": rate * _CODEBOOK_SHARE, "lr": rate}


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Weights and biases of normalisation layers."""
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            yield from ((f"{name}.{key}", value) for key, value in module.named_parameters(recurse=False))


def _batches(count: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Sequences of every step: all of them in a drawn order, then again."""
    draw = random.Random(seed)
    order: list[int] = []
    while True:
        if len(order) < batch:
            order = list(range(count))
            draw.shuffle(order)
        yield [order.pop() for _ in range(batch)]


class _Divergence:
    """Mean KL divergence of the next token's distribution from the original's, on chosen sequences.

    The original's last hidden states are computed once and kept; logits of both come from the same output head.

    Args:
        model: the original.
        sequences: int64 [n, seqlen].
        progress: who is told.
    """

    def __init__(self, model: PreTrainedModel, sequences: Tensor, progress: Progress) -> None:
        self._sequences, self._device = sequences, model.device
        compute = _compute_dtype(model.device)
        head = model.get_output_embeddings()
        self._head = head.weight.detach().to(compute)
        self._targets: list[Tensor] = []
        with torch.no_grad(), progress.task("original", len(sequences), "sequences") as task:
            for sequence in sequences:
                self._targets.append(_last_hidden(model, sequence[None].to(self._device))[0].to(compute))
                task.advance()

    @torch.no_grad()
    def measure(self, student: PreTrainedModel, chosen: list[int]) -> float:
        """The loss on these sequences, as a figure."""
        return self(student, chosen).item()

    def __call__(self, student: PreTrainedModel, chosen: list[int]) -> Tensor:
        """The loss on these sequences, float32 []."""
        hidden = _last_hidden(student, self._sequences[chosen].to(self._device))
        target = torch.cat([self._targets[i] for i in chosen])
        loss: Tensor = _HeadDivergence.apply(hidden.reshape(-1, hidden.shape[-1]), target, self._head)
        return loss


def _last_hidden(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden


class _HeadDivergence(torch.autograd.Function):
    """KL through the output head, few tokens at a time: logits of a whole batch would be most of the memory."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target: Tensor, head: Tensor) -> Tensor:
        gradient, total = torch.empty_like(hidden), 0.0
        for start in range(0, len(hidden), _HEAD_ROWS):
            rows = slice(start, start + _HEAD_ROWS)
            own = nn.functional.linear(hidden[rows].to(head.dtype), head).float().log_softmax(dim=-1)
            wanted = nn.functional.linear(target[rows], head).float().log_softmax(dim=-1)
            p = wanted.exp()
            total += float((p * (wanted - own)).sum())
            gradient[rows] = (own.exp_().sub_(p) / len(hidden)).to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        return hidden.new_tensor(total / len(hidden))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradients[0] * gradient, None, None


@torch.no_grad()
def _collect(job: Job, student: nn.Module) -> dict[str, Tensor]:
    """What moved, as it goes to disk."""
    found: dict[str, Tensor] = {}
    for name, layer in student.named_modules():
        if isinstance(layer, TunedLinear):
            found[f"{name}.weight_scale"] = layer.scale().clamp(max=_LARGEST_HALF).half().cpu()
            found[f"{name}.weight_codebook"] = layer.codebook.ship()
            if layer.site.codebook is not None:
                found[f"{name}.act_codebook"] = layer.site.codebook.ship()
    dtypes = {name: parameter.dtype for name, parameter in job.model.named_parameters()}
    return found | {name: value.to(dtypes[name]).cpu() for name, value in _norms(student)}
