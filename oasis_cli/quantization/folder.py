"""Writing the quantized model folder: one safetensors file a decoder block, so that finished blocks survive a kill."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import write_text
from oasis_cli.formats.manifest import digest_file, read_json, write_json, write_sealed
from oasis_cli.formats.packing import unpack_indices
from oasis_cli.formats.quantized import AS_IT_IS, REPORT_NAME, LayerSpec, QuantizationSpec
from oasis_cli.formats.tensors import save_tensors
from oasis_cli.models.checkpoint import Checkpoint
from oasis_cli.models.sites import decoder_blocks
from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.gemm import QuantizedWeight
from oasis_cli.quantization.kmeans_weights import to_decibels
from oasis_cli.quantization.methods import StoredLayer
from oasis_cli.quantization.model_card import model_card
from oasis_cli.quantization.selection import HEAD
from oasis_cli.runtime.folder_files import MODELING_FILE, auto_map, modeling_source

INDEX_NAME: Final = "model.safetensors.index.json"
_COPIED: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_HALF_BYTES: Final = 2


def block_of(number: int) -> int:
    """The decoder block whose layers file `number` holds; that of file 1 does not exist."""
    return number - 2


class BlockFiles:
    """The weight files of a folder: number 1 holds what is outside of the blocks, number i + 2 decoder block i.

    Args:
        folder: where they go.
        model: the original, whose unquantized tensors are copied.
        spec: what is quantized; its layers' output sizes are filled in from the model.
        run: digest of inputs and settings; a file of another run is written again.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, spec: QuantizationSpec, run: str) -> None:
        self._folder, self._model, self._spec, self._run = folder, model, spec, run
        self._prefix, blocks = decoder_blocks(model)
        self._total = len(blocks) + 1
        self._kept = _kept_tensors(model, spec)
        self.reports: dict[str, dict[str, Any]] = {}
        self._sizes = {"bytes_before": 0, "bytes_after": 0, "bytes_other": 0}
        self._weight_map: dict[str, str] = {}

    def _path(self, number: int) -> Path:
        return self._folder / f"model-{number:05d}-of-{self._total:05d}.safetensors"

    def _members(self, number: int, names: Mapping[str, Any]) -> tuple[str, ...]:
        """Names that belong into file `number`."""
        inside = f"{self._prefix}."
        if number == 1:
            return tuple(name for name in names if not name.startswith(inside))
        return tuple(name for name in names if name.startswith(f"{inside}{block_of(number)}."))

    def blocks(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Every file's number and the quantized layers in it."""
        for number in range(1, self._total + 1):
            yield number, self._members(number, self._spec.layers)

    def _sidecar(self, number: int) -> Path:
        """What belongs to a file while the run lasts: whose it is, and its layers' reports, whose seconds vary."""
        return self._folder / f".report-{number:05d}.json"

    def take_up(self, number: int) -> bool:
        """Whether an interrupted run of the same inputs finished this file, whose report is then taken over."""
        try:
            with safe_open(self._path(number), "pt") as file:
                sizes = {name: _nbytes(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 - not a dict
            kept = read_json(self._sidecar(number))
        except (OSError, SafetensorError, InputError):
            return False
        if kept.get("run") != self._run:
            return False
        self._note(number, sizes, kept["layers"])
        return True

    def read_layers(self, number: int) -> dict[str, StoredLayer]:
        """The quantized layers of a finished file, by name."""
        tensors = load_file(self._path(number))
        return {
            name: _read_layer(name, tensors, self._spec.layers[name].in_features)
            for name in self._members(number, self._spec.layers)
        }

    def replace(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Put other tensors in the place of a finished file's; done twice it changes nothing more."""
        before = load_file(self._path(number))
        after = {name: tensors.get(name, tensor) for name, tensor in before.items()}
        save_tensors(self._path(number), after, {"format": "pt"})
        for name in self._members(number, self._spec.layers):
            weight = self._model.get_submodule(name).weight.detach().float().cpu()
            found = _read_layer(name, after, self._spec.layers[name].in_features).weight.dequantize()
            error, signal = float((weight - found).double().square().sum()), float(weight.double().square().sum())
            relative = error / signal if signal else 0.0
            self.reports[name] |= {"relative_error": relative, "snr_db": to_decibels(relative)}

    def write_block(self, number: int, layers: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Any]]]) -> None:
        """Write one file: the block's quantized layers and its tensors that stay as they are."""
        tensors = {name: self._kept[name] for name in self._members(number, self._kept)}
        reports = {}
        for layer, (found, report) in layers.items():
            tensors.update(found)
            reports[layer] = dict(report) | self._describe(layer, found)
        ordered = {name: tensors[name].detach().contiguous() for name in sorted(tensors)}
        self._sidecar(number).unlink(missing_ok=True)
        save_tensors(self._path(number), ordered, {"format": "pt"})
        # last: a file counts as finished once its sidecar is there
        write_json(self._sidecar(number), {"run": self._run, "layers": reports})
        self._note(number, {name: tensor.nbytes for name, tensor in ordered.items()}, reports)

    def _describe(self, layer: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        spec = self._spec
        size = spec.layers[layer]
        stored = 8 * sum(tensor.nbytes for tensor in tensors.values())
        return {
            "site": size.site,
            "K": size.in_features,
            "N": self._model.get_submodule(layer).weight.shape[0],
            "weight_bits": size.weight_bits,
            "act_bits": size.act_bits,
            "bits_a_weight": stored / self._model.get_submodule(layer).weight.numel(),
            "outlier_share": 2 * spec.outliers_a_side(size.in_features) / size.in_features
            if size.quantizes_activations
            else 0.0,
        }

    def _note(self, number: int, sizes: Mapping[str, int], reports: Mapping[str, dict[str, Any]]) -> None:
        self.reports.update(reports)
        quantized = {f"{layer}." for layer in reports}
        for name, nbytes in sizes.items():
            self._weight_map[name] = self._path(number).name
            inside = name.rsplit(".", 1)[0] + "." in quantized and not name.endswith(".bias")
            self._sizes["bytes_after" if inside else "bytes_other"] += nbytes
        self._sizes["bytes_before"] += sum(r["K"] * r["N"] * _HALF_BYTES for r in reports.values())

    def summarise(self) -> dict[str, Any]:
        """Write the index and give the report's `layers` and `totals`."""
        index = {
            "metadata": {"total_size": self._sizes["bytes_after"] + self._sizes["bytes_other"]},
            "weight_map": self._weight_map,
        }
        write_json(self._folder / INDEX_NAME, index)
        for number in range(1, self._total + 1):
            self._sidecar(number).unlink()
        energy = {name: r["relative_error"] * _square_sum(self._model, name) for name, r in self.reports.items()}
        signal = sum(_square_sum(self._model, name) for name in self.reports)
        relative = sum(energy.values()) / signal if signal else 0.0
        sites = {
            r["site"]: {"grid_cost": r["site_grid_cost"]} for r in self.reports.values() if r["act_bits"] < AS_IT_IS
        }
        return {"layers": self.reports, "sites": sites, "totals": self._sizes | {"relative_error": relative}}


def _read_layer(name: str, tensors: Mapping[str, Tensor], K: int) -> StoredLayer:
    weight_step, act_step = tensors[f"{name}.codebook_steps"].tolist()
    codebook = Codebook(tensors[f"{name}.weight_codebook"], weight_step)
    weight = QuantizedWeight(unpack_indices(tensors[f"{name}.weight"], K), codebook, tensors[f"{name}.weight_scale"])
    act_codebook = tensors.get(f"{name}.act_codebook")
    return StoredLayer(weight, None if act_codebook is None else Codebook(act_codebook, act_step))


def _square_sum(model: PreTrainedModel, layer: str) -> float:
    return float(model.get_submodule(layer).weight.double().square().sum())


def _nbytes(view: Any) -> int:
    """Bytes of a tensor that is not loaded."""
    sizes = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4}
    count = 1
    for extent in view.get_shape():
        count *= extent
    return count * sizes[view.get_dtype()]


def _kept_tensors(model: PreTrainedModel, spec: QuantizationSpec) -> dict[str, Tensor]:
    """Tensors that stay as they are; of tied ones only the first, as transformers stores them."""
    quantized = {f"{name}.weight" for name in spec.layers}
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if name in quantized or (tensor.numel() and tensor.data_ptr() in seen):
            continue
        seen.add(tensor.data_ptr())
        kept[name] = tensor
    return kept


def with_sizes(spec: QuantizationSpec, model: PreTrainedModel, where: Path) -> dict[str, LayerSpec]:
    """The specification's layers with the sizes that the model's own layers have.

    Raises:
        InputError: the calibration names a layer that the model lacks, or one of another width.
    """
    modules = dict(model.named_modules())
    sized = {}
    for name, layer in spec.layers.items():
        weight = getattr(modules.get(name), "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.shape[1] != layer.in_features:
            raise InputError(f"{where}: {name} of the calibration does not fit the model; run oasis calibrate again")
        sized[name] = replace(layer, out_features=weight.shape[0])
    return sized


def finish_folder(folder: Path, checkpoint: Checkpoint, spec: QuantizationSpec, report: dict[str, Any]) -> None:
    """Write configuration, tokenizer, model card and report around the weight files; the report lists all digests."""
    config = checkpoint.config.to_dict() | {"quantization_config": spec.to_config()}
    if HEAD in spec.layers:  # what it was tied to stays as it is
        config["tie_word_embeddings"] = False
    architecture = checkpoint.config.architectures[0]
    config.pop("_name_or_path", None)  # where the original lay is nobody's business, and would change the bytes
    config["auto_map"] = auto_map(architecture)
    write_json(folder / "config.json", config)
    write_text(folder / MODELING_FILE, modeling_source(architecture))
    copy_tokenizer(folder, checkpoint)
    write_text(folder / "README.md", model_card(report, spec))
    report["files"] = {
        file.name: digest_file(file) for file in sorted(folder.iterdir()) if file.name not in (REPORT_NAME, "README.md")
    }
    write_sealed(folder / REPORT_NAME, report)


def copy_tokenizer(folder: Path, checkpoint: Checkpoint) -> None:
    """Put the model's tokenizer into a folder."""
    if checkpoint.kind == "gguf":
        checkpoint.load_tokenizer().save_pretrained(folder)
        return
    for name in _COPIED:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, folder / name)
