"""A small quantized folder with random numbers, written straight from the format's description."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclass(frozen=True)
class Recipe:
    model_type: str = "llama"
    hidden: int = 16
    intermediate: int = 23  # odd: the last half byte of a channel is padding
    blocks: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocab: int = 40
    tied: bool = True
    biased: bool = False
    weight_bits: int = 4
    act_bits: int = 4
    outlier_fraction: float = 0.05
    outlier_mode: str = "dynamic"
    scale_kind: str = "absmax"
    codebook_grid: str = "int8"
    dtype: torch.dtype = torch.float32
    rope: tuple[tuple[str, Any], ...] = (("rope_type", "default"), ("rope_theta", 10000.0))
    seed: int = 0
    left_alone: tuple[str, ...] = ()


def model_config(recipe: Recipe) -> PretrainedConfig:
    extra: dict[str, Any] = {}
    if recipe.model_type == "llama":
        extra = {"attention_bias": recipe.biased, "mlp_bias": recipe.biased}
    if recipe.model_type == "mistral":
        extra = {"sliding_window": 32}
    if recipe.model_type != "qwen2":
        extra["head_dim"] = recipe.head_dim
    return CONFIGS[recipe.model_type](
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.blocks,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        vocab_size=recipe.vocab,
        max_position_embeddings=64,
        tie_word_embeddings=recipe.tied,
        rope_parameters=dict(recipe.rope),
        architectures=[ARCHITECTURES[recipe.model_type]],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        **extra,
    )


def layer_sizes(recipe: Recipe, head_dim: int) -> dict[str, tuple[str, str, int, int]]:
    """Layer suffix -> (site suffix, parent, K, N)."""
    h, i = recipe.hidden, recipe.intermediate
    q, kv = recipe.heads * head_dim, recipe.kv_heads * head_dim
    qkv = "self_attn.q_proj+k_proj+v_proj"
    return {
        "self_attn.q_proj": (qkv, "attention", h, q),
        "self_attn.k_proj": (qkv, "attention", h, kv),
        "self_attn.v_proj": (qkv, "attention", h, kv),
        "self_attn.o_proj": ("self_attn.o_proj", "output", q, h),
        "mlp.gate_proj": ("mlp.gate_proj+up_proj", "mlp", h, i),
        "mlp.up_proj": ("mlp.gate_proj+up_proj", "mlp", h, i),
        "mlp.down_proj": ("mlp.down_proj", "mlp", i, h),
    }


def random_codebook(bits: int, grid: str, generator: torch.Generator) -> tuple[Tensor, float]:
    """Ascending centroids in about [-1, 1]; on the int8 grid multiples of a step of four bits."""
    if grid == "fp16":
        values = torch.rand(2**bits, generator=generator) * 2 - 1
        return values.sort().values.half(), 0.0
    step = 9 * 2.0**-10
    integers = torch.randint(-127, 128, (2**bits,), generator=generator).sort().values
    return (integers * step).half(), step


def _pack(index: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(index, (0, index.shape[1] % 2))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def quantized_tensors(recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Every tensor of the folder, and the `layers` block of its configuration."""
    g = torch.Generator().manual_seed(recipe.seed)
    config = model_config(recipe)
    head_dim = getattr(config, "head_dim", None) or recipe.hidden // recipe.heads
    has_bias = {
        "attention": recipe.biased or recipe.model_type == "qwen2",
        "output": recipe.biased,
        "mlp": recipe.biased,
    }

    def normal(*shape: int, mean: float = 0.0, spread: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * spread + mean).to(recipe.dtype)

    tensors = {
        "model.embed_tokens.weight": normal(recipe.vocab, recipe.hidden),
        "model.norm.weight": normal(recipe.hidden, mean=1.0, spread=0.1),
    }
    if not recipe.tied:
        tensors["lm_head.weight"] = normal(recipe.vocab, recipe.hidden)
    layers: dict[str, dict[str, Any]] = {}
    for block in range(recipe.blocks):
        at = f"model.layers.{block}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = normal(recipe.hidden, mean=1.0, spread=0.1)
        sites: dict[str, tuple[Tensor, float]] = {}
        for suffix, (site, group, K, N) in layer_sizes(recipe, head_dim).items():
            name = at + suffix
            if has_bias[group]:
                tensors[f"{name}.bias"] = normal(N, spread=0.3)
            if suffix in recipe.left_alone:
                tensors[f"{name}.weight"] = normal(N, K, spread=K**-0.5)
                continue
            if site not in sites:
                sites[site] = random_codebook(recipe.act_bits, recipe.codebook_grid, g)
            weight_codebook, weight_step = random_codebook(recipe.weight_bits, recipe.codebook_grid, g)
            act_codebook, act_step = sites[site]
            index = torch.randint(0, 2**recipe.weight_bits, (N, K), generator=g, dtype=torch.uint8)
            tensors[f"{name}.weight"] = _pack(index)
            tensors[f"{name}.weight_codebook"] = weight_codebook
            tensors[f"{name}.weight_scale"] = (torch.rand(N, generator=g) + 0.5).half()
            tensors[f"{name}.act_codebook"] = act_codebook.clone()
            tensors[f"{name}.codebook_steps"] = torch.tensor([weight_step, act_step])
            if recipe.outlier_mode == "static":
                tensors[f"{name}.act_thresholds"] = torch.tensor([-1.5, 1.25])
            layers[name] = {"site": at + site, "in_features": K, "out_features": N}
    return tensors, layers


def quantization_config(recipe: Recipe, layers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "quant_method": "oasis",
        "schema_version": 1,
        "method": "oasis-s" if recipe.outlier_mode == "static" else "oasis",
        "weight_bits": recipe.weight_bits,
        "act_bits": recipe.act_bits,
        "outlier_fraction": recipe.outlier_fraction,
        "outlier_mode": recipe.outlier_mode,
        "scale_kind": recipe.scale_kind,
        "codebook_grid": recipe.codebook_grid,
        "layers": layers,
    }


def write_quantized(folder: Path, recipe: Recipe, changes: dict[str, Tensor | None] | None = None) -> Path:
    """Write a folder; `changes` replaces tensors, or drops those that it maps to None."""
    tensors, layers = quantized_tensors(recipe)
    for name, tensor in (changes or {}).items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    config = model_config(recipe)
    config.quantization_config = quantization_config(recipe, layers)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text('{"stand-in": true}', encoding="utf-8")
    return folder
