"""Does `load` give a whole model or a sentence?"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oasis_cli.errors import InputError
from oasis_cli.runtime.folder_files import auto_map, modeling_source
from oasis_cli.runtime.linear import OasisLinear
from oasis_cli.runtime.loading import load, open_quantized


def test_model_is_ready_for_inference(folder: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = load(folder.path)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert isinstance(model.model.layers[0].mlp.up_proj, OasisLinear)
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 40)
    assert capfd.readouterr() == ("", "")
    assert load(str(folder.path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_specification_without_loading(folder: Any) -> None:
    checkpoint, spec = open_quantized(folder.path)
    assert spec == folder.spec
    assert (checkpoint.quantization, checkpoint.kind) == ("oasis", "folder")


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda t: t.pop("model.norm.weight"), "the weights lack model.norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "the model has no place for extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(2)}), "model.norm.weight has shape [2]"),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight"), "lacks model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_what_plain_from_pretrained_lets_pass_is_refused(folder: Any, edit: Any, complaint: str) -> None:
    folder.edit_tensors(edit)
    with pytest.raises(InputError) as caught:
        load(folder.path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_weights_say_the_bytes(folder: Any) -> None:
    size = folder.weights.stat().st_size
    folder.weights.write_bytes(folder.weights.read_bytes()[:-9])
    with pytest.raises(InputError, match=rf"model\.safetensors: truncated \({size - 9:,} of {size:,} bytes\)"):
        load(folder.path)


def test_other_folders_are_refused(tmp_path: Path, folder: Any) -> None:
    with pytest.raises(InputError, match="not found"):
        load(tmp_path / "absent")
    folder.edit_config(quant_method="gptq")
    with pytest.raises(InputError, match="quantized by 'gptq', not by oasis"):
        load(folder.path)
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "float")
    with pytest.raises(InputError, match="is not quantized; run oasis quantize on it first"):
        load(tmp_path / "float")


def test_code_of_the_folder_is_not_run(folder: Any) -> None:
    (folder.path / "modeling_oasis.py").write_text("raise SystemExit('run')")
    assert type(load(folder.path)).__module__.startswith("transformers.models.")


def test_modeling_file_keeps_the_architecture_name() -> None:
    source = modeling_source("MistralForCausalLM")
    assert "class MistralForCausalLM(transformers.MistralForCausalLM):" in source
    assert auto_map("MistralForCausalLM") == {"AutoModelForCausalLM": "modeling_oasis.MistralForCausalLM"}
    with pytest.raises(ValueError, match="not the name of a class"):
        modeling_source("A; import os")
