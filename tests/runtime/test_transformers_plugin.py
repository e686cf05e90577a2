"""Does `from_pretrained` alone load a quantized folder, whole or not at all?"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.quantizers import auto

from oasis_cli.errors import InputError
from oasis_cli.runtime.linear import OasisLinear
from oasis_cli.runtime.registration import register_with_transformers
from oasis_cli.runtime.transformers_plugin import OasisConfig

TOKENS = torch.tensor([[1, 5, 9, 2], [7, 7, 0, 3]])


def load_whole(path: Path, **options: Any) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    assert not any(info.values())
    return model


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("mistral", {"outlier_mode": "static"}),
        ("qwen2", {"outlier_mode": "none", "act_bits": 3}),
        ("llama", {"codebook_grid": "fp16"}),
    ],
)
def test_round_trip_keeps_every_bit(tmp_path: Path, make_folder: Any, family: str, settings: dict[str, Any]) -> None:
    folder = make_folder(family, **settings)
    model = load_whole(folder.path)
    stored = load_file(folder.weights)
    assert stored.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(tensor, stored[name]), name
    model.save_pretrained(tmp_path / "again")
    again = load_whole(tmp_path / "again")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["quantization_config"] == folder.spec.to_config()
    assert "auto_map" not in saved, "the file that it names is not there"


def test_every_layer_of_the_blocks_is_quantized_and_nothing_else(folder: Any) -> None:
    model = load_whole(folder.path)
    quantized = {name for name, module in model.named_modules() if isinstance(module, OasisLinear)}
    assert quantized == set(folder.spec.layers)
    assert len(quantized) == 14
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_weights_stay_tied_when_saved(tmp_path: Path, folder: Any) -> None:
    load_whole(folder.path).save_pretrained(tmp_path / "again")
    assert "lm_head.weight" not in load_file(tmp_path / "again" / "model.safetensors")
    again = load_whole(tmp_path / "again")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_shards(tmp_path: Path, folder: Any) -> None:
    model = load_whole(folder.path)
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert torch.equal(load_whole(tmp_path / "shards")(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "auto"])
def test_no_dtype_touches_the_numbers_of_the_format(folder: Any, dtype: Any) -> None:
    model = load_whole(folder.path, dtype=dtype)
    assert model.model.norm.weight.dtype == (torch.float32 if dtype == "auto" else dtype)
    model = model.to(torch.bfloat16)
    stored = load_file(folder.weights)
    for layer in folder.spec.layers:
        for name, tensor in model.get_submodule(layer).state_dict().items():
            assert tensor.dtype == stored[f"{layer}.{name}"].dtype
            assert torch.equal(tensor, stored[f"{layer}.{name}"])
    assert model(TOKENS).logits.isfinite().all()


def test_device_map(folder: Any) -> None:
    model = load_whole(folder.path)
    assert torch.equal(load_whole(folder.path, device_map="cpu")(TOKENS).logits, model(TOKENS).logits)


def test_generation_goes_on_as_without_a_cache(folder: Any) -> None:
    model = load_whole(folder.path)
    with_cache = model.generate(TOKENS, max_new_tokens=6, do_sample=False, pad_token_id=0)
    without = model.generate(TOKENS, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False)
    assert with_cache.shape == (2, 10)
    assert torch.equal(with_cache, without)


DAMAGE: dict[str, tuple[Callable[[Any], object], str]] = {
    "tensor gone": (
        lambda f: f.edit_tensors(lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale")),
        "lacks model.layers.0.mlp.up_proj.weight_scale; run oasis quantize again",
    ),
    "dtype": (
        lambda f: f.edit_tensors(
            lambda t: t.update({k: v.float() for k, v in t.items() if k.endswith("act_codebook")})
        ),
        "act_codebook is F32 [16], F16 [16] is due",
    ),
    "signed": (
        lambda f: f.edit_tensors(lambda t: t.update({k: v.char() for k, v in t.items() if v.dtype == torch.uint8})),
        "weight is I8 [24, 12], U8 [24, 12] is due",
    ),
    "shape": (
        lambda f: f.edit_tensors(lambda t: t.update({k: v[:7] for k, v in t.items() if k.endswith("weight_codebook")})),
        "weight_codebook is F16 [7], F16 [16] is due",
    ),
    "newer": (
        lambda f: f.edit_config(schema_version=2),
        "config.json: written by a newer version of oasis (schema 2",
    ),
    "version": (lambda f: f.edit_config(schema_version="1"), "damaged, schema_version is '1'"),
    "bits": (lambda f: f.edit_config(weight_bits=9), "damaged quantization_config (weight_bits is 9)"),
    "no layers": (lambda f: f.edit_config(layers={}), "damaged quantization_config (no layers)"),
    "strange layer": (
        lambda f: f.edit_config(layers={"model.nothing": {"site": "s", "in_features": 1, "out_features": 1}}),
        "names model.nothing, which the model lacks",
    ),
    "no linear layer": (
        lambda f: f.edit_config(layers={"model.norm": {"site": "s", "in_features": 1, "out_features": 1}}),
        "names model.norm, which the model lacks",
    ),
    "sizes": (
        lambda f: f.edit_config(
            layers={"model.layers.0.mlp.up_proj": {"site": "s", "in_features": 24, "out_features": 36}}
        ),
        "model.layers.0.mlp.up_proj is 24 to 36 channels in quantization_config and 24 to 37 in the model",
    ),
}


@pytest.mark.parametrize(("damage", "complaint"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused_by_from_pretrained(folder: Any, damage: Callable[[Any], object], complaint: str) -> None:
    damage(folder)
    with pytest.raises(InputError) as caught:
        AutoModelForCausalLM.from_pretrained(folder.path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_bias_is_refused(make_folder: Any) -> None:
    folder = make_folder("qwen2")
    folder.edit_tensors(lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(InputError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.bias"):
        AutoModelForCausalLM.from_pretrained(folder.path)


def test_a_state_dict_of_the_caller(folder: Any) -> None:
    model = load_whole(folder.path)
    config = AutoConfig.from_pretrained(folder.path)
    again = type(model).from_pretrained(None, config=config, state_dict=load_file(folder.weights))
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_float_checkpoints_are_not_quantized_on_load(tmp_path: Path, folder: Any) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).save_pretrained(tmp_path / "float")
    with pytest.raises(InputError, match="run oasis quantize first"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "float", quantization_config=OasisConfig(**folder.spec.to_config())
        )


def run_python(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter, since this one has the plug-in; its dynamic modules go to a folder of their own."""
    environment = {
        "PYTHONPATH": ":".join(sys.path),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, timeout=120
    )


LOAD = """
model, info = AutoModelForCausalLM.from_pretrained({path!r}, output_loading_info=True{options})
assert not any(info.values()), info
print(type(model.model.layers[0].mlp.up_proj).__name__)
"""


def test_without_the_plug_in_transformers_refuses_and_trusted_code_brings_it(folder: Any, tmp_path: Path) -> None:
    code = "from transformers import AutoModelForCausalLM\ntry:\n"
    code += f"    AutoModelForCausalLM.from_pretrained({str(folder.path)!r})\n"
    code += "except RuntimeError as error:\n    assert 'mismatch' in str(error)\n    print('refused')"
    code += LOAD.format(path=str(folder.path), options=", trust_remote_code=True")
    result = run_python(code, tmp_path)
    assert (result.returncode, result.stdout) == (0, "refused\nOasisLinear\n"), result.stderr


def test_registering_waits_for_transformers(folder: Any, tmp_path: Path) -> None:
    code = "import sys; from oasis_cli.runtime.registration import register_with_transformers as register\n"
    code += "register(); register(); assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    code += "from transformers import AutoModelForCausalLM" + LOAD.format(path=str(folder.path), options="")
    code += "register(); assert 'Await' not in str(sys.meta_path)"
    result = run_python(code, tmp_path)
    assert (result.returncode, result.stdout) == (0, "OasisLinear\n"), result.stderr


def test_registering_after_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "oasis_cli.runtime.transformers_plugin")
    for table in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(table, "oasis")
    finders = list(sys.meta_path)
    register_with_transformers()
    register_with_transformers()
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["oasis"].__name__ == "OasisConfig"
    assert auto.AUTO_QUANTIZER_MAPPING["oasis"].__name__ == "OasisHfQuantizer"
    assert sys.meta_path == finders
