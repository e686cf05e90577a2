"""The image must read text as the quantized folder does, also where the tokenizer's class hangs on the model's type."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.conftest import Chain


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_folder_and_image_measure_the_same(
    cli: Callable[..., Result], chain: Chain, tmp_path: Path, tokenizer_class: str
) -> None:
    """Qwen2 with a foreign tokenizer_class, as distilled models have it: once 504.6 against 521.1."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = tmp_path / "model"
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(model)
    (model / "tokenizer.json").write_bytes((chain.model / "tokenizer.json").read_bytes())
    settings = json.loads((chain.model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": tokenizer_class}))
    q, image = tmp_path / "q", tmp_path / "image"
    for args in (
        ("calibrate", model, "--out", tmp_path / "c", "--samples", 1, "--seqlen", 64),
        ("quantize", model, "--calibration", tmp_path / "c", "--out", q),
        ("compile", q, "--out", image),
    ):
        done = cli(*args)
        assert done.exit_code == 0, done.stderr
    values = []
    for target in (q, image):
        done = cli("eval", target, "--seqlen", 64, "--limit", 2, "--json", tmp_path / "r.json", "-q")
        assert done.exit_code == 0, done.stderr
        found = json.loads((tmp_path / "r.json").read_text())["perplexity"][0]
        values.append((found["value"], found["bos"]))
    assert values[0] == values[1]
