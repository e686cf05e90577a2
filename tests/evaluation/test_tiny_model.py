import logging
import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from oasis_cli.data.embedded import embedded_text
from oasis_cli.data.windows import Windows, token_windows
from oasis_cli.evaluation.perplexity import perplexity
from oasis_cli.tiny import tiny_model_folder

SEQLEN = 256


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_folder())


@pytest.fixture
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder()).eval()


@pytest.fixture
def windows(tokenizer: Any) -> Windows:
    return token_windows(embedded_text("evaluation"), tokenizer, SEQLEN, limit=8, vocab_size=1024)


def test_the_folder_is_small_and_readable_by_all() -> None:
    files = [path for path in tiny_model_folder().iterdir() if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) < 4_000_000


def test_the_tokenizer_loads_in_silence(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        loaded = AutoTokenizer.from_pretrained(tiny_model_folder())
    assert (caplog.text, capfd.readouterr().err) == ("", "")
    assert loaded.is_fast
    assert None not in (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id)


@given(st.text())
def test_the_tokenizer_writes_any_text_and_adds_nothing(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("")["input_ids"] == []


def test_perplexity_is_that_of_transformers_own_loss(model: Any, windows: Windows) -> None:
    with torch.no_grad():
        expected = model(windows.tokens, labels=windows.tokens).loss.exp().item()
    assert perplexity(lambda x: model(x).logits, windows).value == pytest.approx(expected, rel=1e-5)


def test_four_bits_hurt_and_do_not_destroy(model: Any, windows: Windows) -> None:
    """Chance is 1024. Text of another Python moves the figures a little, hence the margins."""
    plain = perplexity(lambda x: model(x).logits, windows).value
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.weight.data = to_four_bits(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, inputs: (to_four_bits(inputs[0]),))
    quantized = perplexity(lambda x: model(x).logits, windows).value
    assert 20 < plain < 70
    assert 1.03 < quantized / plain < 2


def test_the_page_names_the_text_it_was_trained_on() -> None:
    page = (tiny_model_folder() / "README.md").read_text(encoding="utf-8")
    assert re.search(r"sha256:[0-9a-f]{64}", page)
    assert "Never quote them" in page


def to_four_bits(x: Tensor) -> Tensor:
    """Round to nearest, symmetric, a scale a row."""
    scale = x.abs().amax(-1, keepdim=True) / 7
    return (x / scale).round() * scale
