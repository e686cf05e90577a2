"""What the program needs to know of a model's configuration: sizes, rotary frequencies, special tokens."""

from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from oasis_cli.errors import InputError
from oasis_cli.formats.image_metadata import TokenIds
from oasis_cli.formats.program import ModelShape

ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_FIXED_ROPE: Final = ("default", "linear", "llama3", "yarn")


def read_shape(config: PretrainedConfig, where: str) -> ModelShape:
    """Sizes of a supported model.

    Args:
        config: transformers' configuration.
        where: the folder, for messages.

    Raises:
        InputError: the architecture, its activation or its rotary positions are not supported.
    """
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise InputError(f"{where}: oasis compile supports {known}, not {config.model_type}; choose such a model")
    if config.hidden_act != "silu":
        raise InputError(f"{where}: activation {config.hidden_act!r} is not supported, only silu; choose such a model")
    qwen = config.model_type == "qwen2"
    attention_bias = qwen or bool(getattr(config, "attention_bias", False))
    return ModelShape(
        name=config.model_type,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        blocks=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        attention_bias=attention_bias,
        max_positions=config.max_position_embeddings,
        output_bias=attention_bias and not qwen,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
    )


def rotary_frequencies(config: PretrainedConfig, where: str) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor on cosine and sine, as transformers computes them.

    Raises:
        InputError: frequencies that depend on the length of the text, which one table cannot hold.
    """
    kind = config.rope_parameters["rope_type"]
    if kind not in _FIXED_ROPE:
        known = ", ".join(_FIXED_ROPE)
        raise InputError(f"{where}: rotary positions {kind!r} are not supported, only {known}; choose such a model")
    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.to(torch.float32), float(rotary.attention_scaling)


def attention_window(config: PretrainedConfig) -> int | None:
    """How many tokens a position attends to at most, in the narrowest layer; None for all."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    if window is None or (layers is not None and "sliding_attention" not in layers):
        return None
    return int(window)


def special_tokens(config: PretrainedConfig) -> TokenIds:
    """The model's special tokens."""
    eos = config.eos_token_id
    listed = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    return TokenIds(config.bos_token_id, listed, config.pad_token_id)


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The rotary parameters as the configuration gives them, for people."""
    return dict(config.rope_parameters)
