"""Opening a model: a Hugging Face folder, a GGUF file, or a hub id, checked before anything is loaded."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from oasis_cli.errors import InputError
from oasis_cli.formats.manifest import digest_file, digest_of
from oasis_cli.models.configuration import CONFIG_FILE, read_folder_config, read_gguf_config
from oasis_cli.models.gguf_file import GgufHeader, is_gguf, read_gguf_header, read_gguf_weights
from oasis_cli.models.quiet import quiet_transformers
from oasis_cli.models.safetensors_files import find_weight_files, read_header
from oasis_cli.paths import user_path
from oasis_cli.progress import SILENT, Progress

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk that was found sound as far as can be told without loading it.

    Attributes:
        path: the folder, or the GGUF file.
        kind: which of the two.
        name: the hub id, or the folder's or file's name.
        config: transformers' configuration.
        weight_files: the files that hold the weights, sorted.
        quantization: `oasis`, another tool's method, or None; GGUF counts as None, its weights are dequantized.
    """

    path: Path
    kind: Literal["folder", "gguf"]
    name: str
    config: PretrainedConfig
    weight_files: tuple[Path, ...]
    quantization: str | None = None
    _header: GgufHeader | None = field(default=None, repr=False)

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that the weights are stored in; float32 for GGUF, whose weights are dequantized."""
        stored = self.config.dtype
        return stored if self.kind == "folder" and isinstance(stored, torch.dtype) else torch.float32

    @property
    def weight_bytes(self) -> int:
        """Size of the weight files."""
        return sum(file.stat().st_size for file in self.weight_files)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the weights and the configuration; read once, when first asked for."""
        if self.kind == "gguf":
            return digest_of({"gguf": digest_file(self.path)})
        return digest_of({file.name: digest_file(file) for file in (*self.weight_files, self.path / CONFIG_FILE)})

    def load_model(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        progress: Progress = SILENT,
    ) -> PreTrainedModel:
        """Load the weights, every one of them, for inference.

        Args:
            dtype: of all floating-point weights.
            device: where the model goes.
            progress: told about every tensor.

        Raises:
            InputError: quantized already, tensors missing, left over or of another shape, or values not finite.
        """
        if self.quantization is not None:
            raise InputError(f"{self.path}: is quantized already ({self.quantization}); name the original model")
        with quiet_transformers():
            model, info = self._load_weights(dtype)
        refuse_incomplete(self.path, info)
        _refuse_not_finite(self.path, model, progress)
        return model.eval().requires_grad_(False).to(device)

    def _load_weights(self, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        source, state = (
            (self.path, None) if self._header is None else (None, self._read_gguf(self._header, model_class))
        )
        # shapes are compared in `refuse_incomplete`, which can name the tensor
        loaded: tuple[PreTrainedModel, dict[str, Any]] = model_class.from_pretrained(
            source,
            config=self.config,
            state_dict=state,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        return loaded

    def _read_gguf(self, header: GgufHeader, model_class: type[PreTrainedModel]) -> dict[str, Tensor]:
        with torch.device("meta"):
            parameters = list(model_class(self.config).state_dict())
        return dict(read_gguf_weights(header, parameters, self.config))

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer that lies with the weights.

        Raises:
            InputError: there is none, or it is damaged.
        """
        if self.kind == "gguf":
            return _load_tokenizer(self.path, self.path.parent, gguf_file=self.path.name)
        return load_tokenizer(self.path)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder.

    Raises:
        InputError: there is none, or it is damaged.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{folder}: no tokenizer files; copy {_TOKENIZER_FILES[0]} of the model into the folder")
    return _load_tokenizer(folder, folder)


def _load_tokenizer(where: Path, folder: Path, **options: str) -> PreTrainedTokenizerBase:
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        reason = " ".join(str(error).split())
        raise InputError(
            f"{where}: the tokenizer cannot be loaded ({reason}); copy the model's tokenizer anew"
        ) from error
    return tokenizer


def refuse_incomplete(where: Path, info: Mapping[str, Any]) -> None:
    """Refuse a load that left weights random, or weights out.

    Args:
        where: the model, for the message.
        info: what transformers gives with `output_loading_info`.

    Raises:
        InputError: a tensor is missing, unexpected or of another shape.
    """
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, due = mismatched[0]
        shapes = f"{name} has shape {list(found)}, the configuration asks for {list(due)}"
        raise InputError(f"{where}: {_and_more(shapes, mismatched)}; config.json and weights do not belong together")
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{where}: the weights lack {_and_more(missing[0], missing)}; download or write the model again"
        )
    if unexpected := sorted(info["unexpected_keys"]):
        first = _and_more(unexpected[0], unexpected)
        raise InputError(f"{where}: the model has no place for {first}; config.json and weights do not belong together")


def _and_more(first: str, all_of_them: list[Any]) -> str:
    return first if len(all_of_them) == 1 else f"{first} (and {len(all_of_them) - 1} more)"


def _refuse_not_finite(where: Path, model: PreTrainedModel, progress: Progress) -> None:
    parameters = dict(model.named_parameters())
    with progress.task("checking weights", len(parameters), "tensors") as task:
        for name, parameter in parameters.items():
            if not all_finite(parameter):
                raise InputError(f"{where}: {name} holds NaN or infinity; the checkpoint is damaged, use another")
            task.advance()


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; true of whole numbers and of nothing."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # the extremes are NaN where any value is: one pass, and no mask as large as the tensor
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def open_checkpoint(spec: str | Path) -> Checkpoint:
    """Find a model and check it without loading it.

    Args:
        spec: a Hugging Face folder, a GGUF file or a folder that holds just one, or a hub id.

    Raises:
        InputError: nothing there, damaged, unsupported, or not to be had from the hub.
    """
    path = user_path(spec)
    try:
        if path.is_dir():
            return _open_folder(path, path.resolve().name)
        if path.is_file():
            return _open_file(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if _HUB_ID.fullmatch(str(spec)) and path.suffix != ".gguf":
        return _open_folder(_download(str(spec)), str(spec))
    raise InputError(f"{path}: not found; name a model folder, a GGUF file or a hub id")


def _open_file(path: Path) -> Checkpoint:
    if not is_gguf(path):
        raise InputError(f"{path}: not a GGUF file; name a GGUF file or the folder that the model lies in")
    header = read_gguf_header(path)
    config = read_gguf_config(header)
    config.dtype = torch.float32  # what the weights are dequantized to
    return Checkpoint(path, "gguf", path.stem, config, (path,), _header=header)


def _open_folder(folder: Path, name: str) -> Checkpoint:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        raise InputError(f"{folder}: holds no files; name a Hugging Face model folder or a GGUF file")
    packed = [path for path in files if path.suffix == ".gguf"]
    if packed and not any(path.suffix == ".safetensors" for path in files):
        if len(packed) > 1:
            raise InputError(f"{folder}: holds {len(packed)} GGUF files; name one of them, such as {packed[0].name}")
        return _open_file(packed[0])
    config, weights = read_folder_config(folder), find_weight_files(folder)
    quantization = _quantization(config)
    if config.dtype is None and quantization is None:
        config.dtype = _stored_dtype(weights)
    return Checkpoint(folder, "folder", name, config, weights, quantization)


def _stored_dtype(files: Sequence[Path]) -> torch.dtype:
    """The type of the largest tensor, where the configuration does not say any."""
    tensors = (tensor for file in files for tensor in read_header(file).values())
    largest = max(tensors, key=lambda tensor: math.prod(tensor.shape), default=None)
    return _FLOATS.get(largest.dtype if largest else "F32", torch.float32)


def _quantization(config: PretrainedConfig) -> str | None:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    return str(settings.get("quant_method", "unknown method")) if isinstance(settings, dict) else "unknown method"


def _download(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except (OSError, HFValidationError, HTTPError) as error:  # HTTPError: a proxy that fails
        raise InputError(
            f"{hub_id}: no such folder here, and the hub does not give it ({type(error).__name__}); "
            "check the name, the network and the login, or name a local model"
        ) from error
