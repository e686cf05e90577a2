"""Does a model open as what it is, and does every unusable one get its sentence?"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HFValidationError, HTTPError, OfflineModeIsEnabled
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from oasis_cli.models import checkpoint as module
from oasis_cli.models.checkpoint import open_checkpoint

Refusal = Callable[..., str]


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_folder_opens(llama_folder: Path) -> None:
    checkpoint = open_checkpoint(str(llama_folder))
    assert (checkpoint.kind, checkpoint.name, checkpoint.quantization) == ("folder", "llama", None)
    assert checkpoint.config.model_type == "llama"
    assert checkpoint.weight_files == (llama_folder / "model.safetensors",)
    assert checkpoint.weight_bytes == (llama_folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["50GB", "6KB"])
def test_model_loads_as_it_was_saved(
    tmp_path: Path, tiny_model: Callable[..., PreTrainedModel], family: str, tied: bool, shard: str
) -> None:
    original = tiny_model(family, tie_word_embeddings=tied)
    original.save_pretrained(tmp_path / "model", max_shard_size=shard)
    model = open_checkpoint(tmp_path / "model").load_model()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens).logits, original(tokens).logits)


def test_bfloat16_weights_are_widened_exactly(tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]) -> None:
    original = tiny_model().to(torch.bfloat16)
    original.save_pretrained(tmp_path / "model")
    model = open_checkpoint(tmp_path / "model").load_model()
    assert model.dtype == torch.float32
    assert torch.equal(model.model.embed_tokens.weight, original.model.embed_tokens.weight.float())
    assert open_checkpoint(tmp_path / "model").load_model(torch.bfloat16).dtype == torch.bfloat16


def test_what_the_configuration_leaves_out_is_found(
    tmp_path: Path, tiny_model: Callable[..., PreTrainedModel], edit_json: Callable[..., None]
) -> None:
    tiny_model("mistral").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", dtype=None, architectures=None)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.config.architectures == ["MistralForCausalLM"]


def test_loading_says_nothing(llama_folder: Path, capfd: pytest.CaptureFixture[str], caplog: Any) -> None:
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(llama_folder)
        checkpoint.load_model()
        checkpoint.load_tokenizer()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


def test_loading_leaves_the_random_state_alone(llama_folder: Path) -> None:
    state = torch.get_rng_state()
    open_checkpoint(llama_folder).load_model()
    assert torch.equal(torch.get_rng_state(), state)


def test_digest_sees_weights_and_configuration(llama_folder: Path, edit_json: Callable[..., None]) -> None:
    first = open_checkpoint(llama_folder).digest
    assert first == open_checkpoint(llama_folder).digest
    assert first.startswith("sha256:")
    edit_json(llama_folder / "config.json", rms_norm_eps=1e-3)
    second = open_checkpoint(llama_folder).digest
    edit_tensors(llama_folder, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert len({first, second, open_checkpoint(llama_folder).digest}) == 3


def test_tokenizer(llama_folder: Path, refusal: Refusal) -> None:
    assert open_checkpoint(llama_folder).load_tokenizer()("two one").input_ids == [2, 1]
    (llama_folder / "tokenizer.json").write_text("{}")
    assert "the tokenizer cannot be loaded" in refusal(open_checkpoint(llama_folder).load_tokenizer)
    (llama_folder / "tokenizer.json").unlink()
    assert "no tokenizer files" in refusal(open_checkpoint(llama_folder).load_tokenizer)


def test_quantized_folders_are_flagged_and_not_loaded(
    llama_folder: Path, edit_json: Callable[..., None], refusal: Refusal
) -> None:
    for method in ("oasis", "gptq"):
        edit_json(llama_folder / "config.json", quantization_config={"quant_method": method})
        checkpoint = open_checkpoint(llama_folder)
        assert checkpoint.quantization == method
        assert f"is quantized already ({method}); name the original model" in refusal(checkpoint.load_model)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not supported; supported are llama, mistral, qwen2"),
        ({"model_type": None}, "architecture None is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported; only silu-gated MLPs are"),
        ({"hidden_size": "many"}, "damaged"),
        ({"hidden_size": 0}, "hidden_size is 0, not a positive number"),
        ({"vocab_size": -1}, "vocab_size is -1, not a positive number"),
        ({"num_hidden_layers": None}, "damaged"),
        ({"num_attention_heads": 7}, "damaged"),
        ({"num_key_value_heads": 3}, "3 key/value heads, 4 heads: not a multiple"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta is 'x', not a number"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type 'spiral' is unknown"),
        ({"dtype": "float31"}, "damaged"),
        ({"quantization_config": 5}, "damaged"),
    ],
)
def test_configuration_that_cannot_be_used(
    llama_folder: Path, edit_json: Callable[..., None], refusal: Refusal, changes: dict[str, Any], complaint: str
) -> None:
    edit_json(llama_folder / "config.json", **changes)
    message = refusal(open_checkpoint, llama_folder)
    assert message.startswith(f"{llama_folder}/config.json: ")
    assert complaint in message


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama"'])
def test_configuration_that_is_no_json_object(llama_folder: Path, refusal: Refusal, text: str) -> None:
    (llama_folder / "config.json").write_text(text)
    assert "config.json: damaged" in refusal(open_checkpoint, llama_folder)


def test_code_beside_the_model_is_not_run(llama_folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(
        llama_folder / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    (llama_folder / "evil.py").write_text("raise SystemExit('run')")
    assert open_checkpoint(llama_folder).load_model().config.model_type == "llama"


def test_paths_that_lead_nowhere(tmp_path: Path, refusal: Refusal) -> None:
    assert "not found; name a model folder" in refusal(open_checkpoint, tmp_path / "absent")
    assert "not found; name a model folder" in refusal(open_checkpoint, tmp_path / "absent.gguf")
    (tmp_path / "empty").mkdir()
    assert "holds no files" in refusal(open_checkpoint, tmp_path / "empty")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("hello")
    assert "no config.json" in refusal(open_checkpoint, tmp_path / "notes")
    assert "a.txt: not a GGUF file" in refusal(open_checkpoint, tmp_path / "notes" / "a.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads everything")
def test_folder_that_may_not_be_read(llama_folder: Path, refusal: Refusal) -> None:
    (llama_folder / "model.safetensors").chmod(0)
    assert "cannot be read (Permission denied)" in refusal(open_checkpoint, llama_folder)


@pytest.mark.parametrize("error", [OfflineModeIsEnabled("offline"), HFValidationError("bad\nname"), HTTPError("proxy")])
@pytest.mark.parametrize("name", ["org/model", "model"])
def test_hub_that_does_not_give(monkeypatch: pytest.MonkeyPatch, refusal: Refusal, error: Exception, name: str) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(module, "snapshot_download", refuse)
    message = refusal(open_checkpoint, name)
    assert message.startswith(f"{name}: no such folder here, and the hub does not give it ({type(error).__name__});")


def test_hub_snapshot_opens_under_its_id(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def give(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(llama_folder)

    monkeypatch.setattr(module, "snapshot_download", give)
    assert open_checkpoint("org/model").name == "org/model"
    assert asked[0][0] == "org/model"
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked[0][1])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("model.norm.weight"), "the weights lack model.norm.weight; download"),
        (lambda t: [t.pop(name) for name in list(t) if "mlp" in name], "mlp.down_proj.weight (and 5 more); download"),
        (lambda t: t.update(extra=torch.zeros(1)), "the model has no place for extra; config.json"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            "model.norm.weight has shape [3], the configuration asks for [16]; config.json",
        ),
        (lambda t: t["model.norm.weight"][3:4].fill_(torch.nan), "model.norm.weight holds NaN or infinity"),
        (lambda t: t["model.embed_tokens.weight"][0, 0:1].fill_(torch.inf), "model.embed_tokens.weight holds NaN"),
        (lambda t: t["lm_head.weight"][0, 0:1].fill_(-torch.inf), "lm_head.weight holds NaN or infinity"),
    ],
)
def test_weights_that_cannot_be_used(
    llama_folder: Path, refusal: Refusal, change: Callable[[dict[str, torch.Tensor]], Any], complaint: str
) -> None:
    edit_tensors(llama_folder, change)
    message = refusal(open_checkpoint(llama_folder).load_model)
    assert message.startswith(f"{llama_folder}: ")
    assert complaint in message


def test_tokens_of_a_published_model() -> None:
    """karpathy's stories260K: its page prints the greedy story; here its first words."""
    data = os.environ.get("OASIS_DATA")
    if not data:
        pytest.skip("OASIS_DATA names no folder with test models")
    checkpoint = open_checkpoint(Path(data) / "models" / "stories260K" / "hf")
    tokenizer, model = checkpoint.load_tokenizer(), checkpoint.load_model()
    story = model.generate(torch.tensor([[1]]), max_new_tokens=24, do_sample=False)
    assert (
        tokenizer.decode(story[0], skip_special_tokens=True)
        .strip()
        .startswith("Once upon a time, there was a little girl")
    )
