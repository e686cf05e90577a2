"""Tiny random checkpoints on disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from oasis_cli.errors import InputError

torch.set_num_threads(1)  # for tiny matrices, threads only wait for each other

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Makes a random model of a family."""

    def make(family: str = "llama", **settings: Any) -> PreTrainedModel:
        config_class, model_class = FAMILIES[family]
        sizes = {
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
        torch.manual_seed(5)
        return model_class(config_class(**sizes | settings)).eval()

    return make


@pytest.fixture
def llama_folder(tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    """A saved llama with its tokenizer."""
    folder = tmp_path / "llama"
    tiny_model().save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture
def sharded_folder(tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    """The same llama in several shards."""
    folder = tmp_path / "sharded"
    tiny_model().save_pretrained(folder, max_shard_size="6KB")
    return folder


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Changes some keys of a JSON file."""

    def edit(path: Path, **changes: Any) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Calls something that must raise InputError; gives the message, which must be one line."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        with pytest.raises(InputError) as caught:
            function(*args, **kwargs)
        message = str(caught.value)
        assert "\n" not in message
        assert ";" in message, "a refusal says how to mend it"
        return message

    return call
