"""A model's configuration: read without running its code, and checked to be of a family that the tool knows."""

from pathlib import Path
from typing import Any, Final

from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from oasis_cli.errors import InputError
from oasis_cli.formats.manifest import read_json
from oasis_cli.models.gguf_file import GgufHeader
from oasis_cli.models.quiet import quiet_transformers

FAMILIES: Final = ("llama", "mistral", "qwen2")
CONFIG_FILE: Final = "config.json"
_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
_DAMAGE: Final = (StrictDataclassError, AttributeError, KeyError, OSError, TypeError, ValueError)


def read_folder_config(folder: Path) -> PretrainedConfig:
    """Configuration of a Hugging Face folder.

    Raises:
        InputError: no config.json, a damaged one, or a family that is not supported.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"{folder}: no {CONFIG_FILE}; name a Hugging Face model folder or a GGUF file")
    _refuse_unknown_family(path, read_json(path).get("model_type"))
    return _checked(path, folder)


def read_gguf_config(header: GgufHeader) -> PretrainedConfig:
    """Configuration that a GGUF file's metadata describe.

    Raises:
        InputError: damaged metadata, a family that is not supported, or scaled rotary positions, which transformers
            does not take over from GGUF.
    """
    path, arch = header.path, header.architecture
    _refuse_unknown_family(path, arch)
    if header.metadata.get(f"{arch}.rope.scaling.type", "none") != "none":
        raise InputError(
            f"{path}: scaled rotary positions are not supported in GGUF; use the model's safetensors folder"
        )
    return _checked(path, path.parent, gguf_file=path.name)


def _refuse_unknown_family(path: Path, family: object) -> None:
    if family not in FAMILIES:
        raise InputError(f"{path}: architecture {family!r} is not supported; supported are {', '.join(FAMILIES)}")


def _checked(path: Path, folder: Path, **options: Any) -> PretrainedConfig:
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except _DAMAGE as error:
        raise _damaged(path, " ".join(str(error).split())) from error
    _check_values(path, config)
    # GGUF and hand-made folders do not say it, and this is the class that will be loaded whatever they say
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    return config


def _check_values(path: Path, config: PretrainedConfig) -> None:
    for name in _SIZES:
        size = getattr(config, name)
        if type(size) is not int or size < 1:
            raise _damaged(path, f"{name} is {size!r}, not a positive number")
    if config.num_attention_heads % config.num_key_value_heads:
        heads = f"{config.num_key_value_heads} key/value heads, {config.num_attention_heads} heads"
        raise _damaged(path, f"{heads}: not a multiple")
    if config.hidden_act != "silu":
        raise InputError(f"{path}: activation {config.hidden_act!r} is not supported; only silu-gated MLPs are")
    rope = config.rope_parameters
    if not isinstance(rope.get("rope_theta"), int | float):
        raise _damaged(path, f"rope_theta is {rope.get('rope_theta')!r}, not a number")
    if rope.get("rope_type") not in ("default", *ROPE_INIT_FUNCTIONS):
        raise _damaged(path, f"rope_type {rope.get('rope_type')!r} is unknown to transformers")


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path}: damaged, {what}; download or write the model again")
