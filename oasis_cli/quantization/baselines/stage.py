"""The quantize stage for methods that oasis is compared with: a folder that runs, and is measured, like any other."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oasis_cli.formats.atomic import is_finished, output_directory
from oasis_cli.formats.baseline import (
    AS_IT_IS,
    BASELINE_KIND,
    BASELINE_SCHEMA_VERSION,
    BASELINES,
    BaselineLayer,
    BaselineSpec,
    Rounding,
)
from oasis_cli.formats.calibration import Calibration
from oasis_cli.formats.manifest import digest_file, manifest, read_sealed, refuse_other_run, write_sealed
from oasis_cli.formats.quantized import REPORT_NAME
from oasis_cli.models.checkpoint import Checkpoint
from oasis_cli.models.quiet import quiet_transformers
from oasis_cli.models.sites import decoder_blocks
from oasis_cli.numerics.hadamard import rotate
from oasis_cli.progress import Progress
from oasis_cli.quantization.baselines.equivalences import rotate_model, smooth
from oasis_cli.quantization.baselines.integer_weights import bits_a_weight, gptq, round_weight
from oasis_cli.quantization.folder import copy_tokenizer
from oasis_cli.quantization.kmeans_weights import to_decibels
from oasis_cli.quantization.sequential import BlockStream
from oasis_cli.quantization.settings import QuantizationSettings
from oasis_cli.runtime.baseline import replace_linear

_QUAROT_CLIP: Final = 0.9
_ATOM_GROUP: Final = 128
_ATOM_CLIPS: Final = (0.85, 0.9)
"""Of weights and of activations; all four as in the authors' scripts."""
_ATOM_SHARE: Final = 128 / 4096
"""Atom keeps 128 channels of LLaMA-7B's 4096 at 8 bits; of other widths here as large a share, in steps of 16."""
_CHANNEL_STEP: Final = 16


@dataclass(frozen=True)
class _Scheme:
    """How a method rounds the two sides of a layer of K input channels."""

    weights: Rounding
    activations: Rounding
    by_feedback: bool = False


def _scheme(options: QuantizationSettings, K: int) -> _Scheme:
    method, bits = options.method, (options.weight_bits, options.act_bits)
    wide = 0
    if method in ("mxfp4", "nvfp4"):
        sides = [Rounding(method) if side < AS_IT_IS else Rounding() for side in bits]
        return _Scheme(sides[0], sides[1])
    group, clips = 0, (1.0, 1.0)
    if method == "quarot":
        clips = (1.0, _QUAROT_CLIP)
    if method == "atom":
        group, clips = _ATOM_GROUP, _ATOM_CLIPS
        wide = options.wide_channels or -(-int(K * _ATOM_SHARE) // _CHANNEL_STEP) * _CHANNEL_STEP
        wide = min(wide, K - 1)
    sides = [
        Rounding("integer", side, group, clip, wide) if side < AS_IT_IS else Rounding()
        for side, clip in zip(bits, clips, strict=True)
    ]
    return _Scheme(sides[0], sides[1], method in ("quarot", "atom"))


def quantize_baseline(
    checkpoint: Checkpoint,
    out: Path,
    calibration: Calibration,
    layers: Mapping[str, str],
    options: QuantizationSettings,
    *,
    device: str,
    resume: bool,
    overwrite: bool,
    progress: Progress,
) -> Mapping[str, Any]:
    """Quantize a model by one of `BASELINES`.

    Args:
        checkpoint: the model, unquantized.
        out: folder for the artifact.
        calibration: of this very model.
        layers: what to quantize, each with its site.
        options: method and bits.
        device: where the work is done.
        resume: leave a finished folder of the same settings as it is; an unfinished one is begun again.
        overwrite: replace an earlier model at `out`.
        progress: who is told.

    Returns:
        The folder's report.

    Raises:
        InputError: `out` occupied, or a rotation that does not exist for this model.
    """
    origin = {"model": checkpoint.digest, "calibration": calibration.digest}
    block = manifest(BASELINE_KIND, BASELINE_SCHEMA_VERSION, origin, asdict(options))
    if resume and is_finished(out, REPORT_NAME):
        existing: Mapping[str, Any] = read_sealed(out / REPORT_NAME, BASELINE_KIND, BASELINE_SCHEMA_VERSION)
        refuse_other_run(out, existing, block)
        return existing
    with output_directory(out, REPORT_NAME, overwrite=overwrite, resumable=False) as folder:
        model = checkpoint.load_model(device=device)
        work = _Work(model, calibration, layers, options)
        rotated = work.prepare(progress)
        reports = work.quantize(rotated, progress)
        spec = work.finish(rotated)
        model.config.quantization_config = spec.to_config()
        with quiet_transformers():
            model.save_pretrained(folder)
        copy_tokenizer(folder, checkpoint)
        report = block | {"model": checkpoint.name, "tuning": None} | _summarise(model, reports)
        report["files"] = {file.name: digest_file(file) for file in sorted(folder.iterdir())}
        write_sealed(folder / REPORT_NAME, report)
    return report


class _Work:
    """A model on its way through a method; it is changed in place."""

    def __init__(
        self, model: PreTrainedModel, calibration: Calibration, layers: Mapping[str, str], options: QuantizationSettings
    ) -> None:
        self._model, self._calibration, self._layers, self._options = model, calibration, layers, options

    def prepare(self, progress: Progress) -> frozenset[str]:
        """The equivalent model that the method rounds; the layers whose inputs are rotated when it runs."""
        if self._options.method == "smoothquant":
            smooth(self._model, self._largest_inputs(progress), self._options.smooth_alpha)
        if self._options.method == "quarot":
            return frozenset(rotate_model(self._model, self._options.seed, self._layers))
        return frozenset()

    @torch.no_grad()
    def _largest_inputs(self, progress: Progress) -> dict[str, Tensor]:
        """Largest magnitude of every input channel on the calibration tokens, by layer."""
        found: dict[str, Tensor] = {}

        def watch(name: str) -> Any:
            def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                largest = args[0].abs().flatten(0, -2).amax(dim=0)
                found[name] = torch.maximum(found[name], largest) if name in found else largest

            return self._model.get_submodule(name).register_forward_pre_hook(keep)

        hooks = [watch(name) for name in self._layers]
        tokens = self._calibration.tokens
        with progress.task("activations", len(tokens), "sequences") as task:
            for sequence in tokens:
                self._model(input_ids=sequence[None].to(self._model.device), use_cache=False, logits_to_keep=1)
                task.advance()
        for hook in hooks:
            hook.remove()
        return found

    def _order(self, name: str) -> Tensor | None:
        """Atom's order of channels: those with the largest sums of squares last."""
        if self._options.method != "atom":
            return None
        return self._calibration.sites[self._layers[name]].second_moments.argsort(stable=True)

    @torch.no_grad()
    def quantize(self, rotated: frozenset[str], progress: Progress) -> dict[str, dict[str, Any]]:
        """Round every weight; the layers' entries in the report."""
        prefix, blocks = decoder_blocks(self._model)
        reports: dict[str, dict[str, Any]] = {}
        stream = None
        if any(self._scheme(name).by_feedback for name in self._layers) and self._options.weight_bits < AS_IT_IS:
            tokens = self._calibration.tokens[: self._options.feedback_samples]
            stream = BlockStream(self._model, tokens, self._layers)
        with progress.task("quantizing", len(self._layers), "layers") as task:
            for number in range(len(blocks)):
                inside = f"{prefix}.{number}."
                names = tuple(name for name in self._layers if name.startswith(inside))
                formats = dict.fromkeys({self._layers[name] for name in names})
                moments = stream.moments(number, names, formats, len(tokens)) if stream and names else {}
                for name in names:
                    reports[name] = self._round(name, moments.get(self._layers[name]), name in rotated)
                    task.advance()
                if stream:
                    stream.advance(number, {name: self._model.get_submodule(name).weight for name in names}, formats)
        return reports

    def _scheme(self, name: str) -> _Scheme:
        return _scheme(self._options, self._model.get_submodule(name).in_features)

    def _round(self, name: str, moments: Tensor | None, rotated: bool) -> dict[str, Any]:
        started, scheme = time.monotonic(), self._scheme(name)
        weight = self._model.get_submodule(name).weight
        before = weight.detach().clone()
        order = self._order(name)
        if scheme.weights.numbers != "none":
            if moments is not None:
                if rotated:
                    moments = rotate(rotate(moments).T)
                found = gptq(before.cpu(), moments.cpu(), scheme.weights, order)
            else:
                found = round_weight(before, scheme.weights, order)
            weight.copy_(found)
        error = float((weight - before).double().square().sum())
        signal = float(before.double().square().sum())
        relative = error / signal if signal else 0.0
        return {
            "site": self._layers[name],
            "K": before.shape[1],
            "N": before.shape[0],
            "weight_bits": self._options.weight_bits,
            "act_bits": self._options.act_bits,
            "bits_a_weight": bits_a_weight(before.shape[1], scheme.weights),
            "relative_error": relative,
            "snr_db": to_decibels(relative),
            "signal": signal,
            "seconds": time.monotonic() - started,
        }

    @torch.no_grad()
    def finish(self, rotated: frozenset[str]) -> BaselineSpec:
        """Put layers that round their inputs in place; the folder's specification."""
        layers = {}
        for name in self._layers:
            original, scheme = self._model.get_submodule(name), self._scheme(name)
            bits = bits_a_weight(original.in_features, scheme.weights)
            layers[name] = BaselineLayer(name in rotated, scheme.activations, bits)
            layer = replace_linear(self._model, name, layers[name])
            layer.weight.copy_(original.weight)
            if original.bias is not None:
                layer.bias.copy_(original.bias)
            if layer.act_order is not None and (order := self._order(name)) is not None:
                layer.act_order.copy_(order)
        options = self._options
        method = next(known for known in BASELINES if known == options.method)
        return BaselineSpec(method, options.weight_bits, options.act_bits, layers)


def _summarise(model: PreTrainedModel, reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The report's `layers` and `totals`; bytes are the method's own, not the folder's, which is dense."""
    signals = {name: entry.pop("signal") for name, entry in reports.items()}
    signal = sum(signals.values())
    noise = sum(entry["relative_error"] * signals[name] for name, entry in reports.items())
    sizes = {name: entry["K"] * entry["N"] for name, entry in reports.items()}
    everything = sum(parameter.nbytes for parameter in model.parameters())
    totals = {
        "bytes_before": 2 * sum(sizes.values()),
        "bytes_after": round(sum(reports[name]["bits_a_weight"] * size / 8 for name, size in sizes.items())),
        "bytes_other": everything - 4 * sum(sizes.values()),
        "relative_error": noise / signal if signal else 0.0,
    }
    return {"layers": dict(reports), "totals": totals}
