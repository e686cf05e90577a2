"""Quantized folders made by hand, so that these tests need no quantizer: round numbers on the grids, then packed."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from oasis_cli.formats.manifest import digest_file, manifest, write_sealed
from oasis_cli.formats.packing import pack_indices
from oasis_cli.formats.quantized import KIND, REPORT_NAME, SCHEMA_VERSION, LayerSpec, QuantizationSpec
from oasis_cli.runtime.folder_files import MODELING_FILE, auto_map, modeling_source
from oasis_cli.runtime.linear import OasisLinear

torch.set_num_threads(1)  # for tiny matrices, threads only wait for each other

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 37,  # odd: the last byte of a packed row is half full
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SPEC = QuantizationSpec("oasis", outlier_fraction=0.02)


def tiny_model(family: str = "llama", tied: bool = False) -> PreTrainedModel:
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    torch.manual_seed(3)
    model = model_class(config_class(**SIZES, tie_word_embeddings=tied)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    return model


def codebook(bits: int, spec: QuantizationSpec, seed: int) -> tuple[Tensor, float]:
    """Ascending centroids between -1 and 1 and their step."""
    generator = torch.Generator().manual_seed(seed)
    if spec.codebook_grid == "fp16":
        return torch.rand(1 << bits, generator=generator).mul(2).sub(1).sort().values.half(), 0.0
    integers = torch.randperm(255, generator=generator)[: 1 << bits].sub(127).sort().values
    return (integers / 128).half(), 1 / 128


def quantize_by_hand(name: str, weight: Tensor, spec: QuantizationSpec) -> dict[str, Tensor]:
    """A layer's tensors: nearest centroids by brute force."""
    scale = weight.abs().amax(dim=1).half()
    weight_codebook, weight_step = codebook(spec.weight_bits, spec, seed=1)
    act_codebook, act_step = codebook(spec.act_bits, spec, seed=2)
    distance = (weight[:, :, None] - scale.float()[:, None, None] * weight_codebook.float()).abs()
    tensors = {
        "weight": pack_indices(distance.argmin(dim=2).to(torch.uint8)),
        "weight_codebook": weight_codebook,
        "weight_scale": scale,
        "act_codebook": act_codebook,
        "codebook_steps": torch.tensor([weight_step, act_step]),
    }
    if spec.outlier_mode == "static":
        tensors["act_thresholds"] = torch.tensor([-1.5, 1.75])
    return {f"{name}.{key}": value.clone() for key, value in tensors.items()}


@dataclass(frozen=True)
class Folder:
    """A quantized folder that tests read and damage."""

    path: Path
    spec: QuantizationSpec

    @property
    def weights(self) -> Path:
        return self.path / "model.safetensors"

    def edit_config(self, **changes: object) -> None:
        config = json.loads((self.path / "config.json").read_text())
        config["quantization_config"] |= changes
        (self.path / "config.json").write_text(json.dumps(config))
        self.list_files()

    def edit_tensors(self, edit: Callable[[dict[str, Tensor]], object]) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(self.weights).items()}
        edit(tensors)
        save_file(tensors, self.weights, metadata={"format": "pt"})
        self.list_files()

    def list_files(self) -> None:
        """Write the report anew, as if the quantizer had written what now is there."""
        self.report({name: digest_file(self.path / name) for name in ("config.json", "model.safetensors")})

    def report(self, files: dict[str, str]) -> None:
        """Write a report that lists files."""
        write_sealed(self.path / REPORT_NAME, manifest(KIND, SCHEMA_VERSION, {}, {}) | {"files": files})


def write_folder(path: Path, model: PreTrainedModel, spec: QuantizationSpec) -> Folder:
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parent, _, own = name.rpartition(".")
            shared = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
            layers[name] = LayerSpec(
                f"{parent}.{shared.get(own, own)}",
                module.in_features,
                module.out_features,
                spec.weight_bits,
                spec.act_bits,
            )
            tensors |= quantize_by_hand(name, module.weight, spec)
    spec = replace(spec, layers=layers)
    path.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    architecture = type(model).__name__
    config = model.config.to_dict() | {"architectures": [architecture], "auto_map": auto_map(architecture)}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": spec.to_config()}))
    (path / MODELING_FILE).write_text(modeling_source(architecture))
    folder = Folder(path, spec)
    folder.list_files()
    return folder


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Folder]:
    """Writes a quantized folder of a family, with settings of the specification."""

    def make(family: str = "llama", tied: bool = False, **settings: Any) -> Folder:
        return write_folder(tmp_path / f"quantized-{family}", tiny_model(family, tied), replace(SPEC, **settings))

    return make


@pytest.fixture
def folder(make_folder: Callable[..., Folder]) -> Folder:
    """A tied llama, quantized W4A4 on the int8 grid with dynamic outliers."""
    return make_folder(tied=True)


@pytest.fixture
def make_layer() -> Callable[..., OasisLinear]:
    """Makes one quantized layer of random weights, with settings of the specification."""

    def make(N: int, K: int, bias: bool = False, **settings: Any) -> OasisLinear:
        spec = replace(SPEC, **settings)
        spec = replace(spec, layers={"layer": LayerSpec("site", K, N, spec.weight_bits, spec.act_bits)})
        layer = OasisLinear("layer", spec, torch.float32 if bias else None)
        generator = torch.Generator().manual_seed(N * 1000 + K)
        tensors = quantize_by_hand("layer", torch.randn(N, K, generator=generator), spec)
        if bias:
            tensors["layer.bias"] = torch.randn(N, generator=generator)
        layer.load_state_dict({name.removeprefix("layer."): tensor for name, tensor in tensors.items()})
        return layer

    return make
