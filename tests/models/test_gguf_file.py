"""Do GGUF weights arrive under the right names, in the right order, with the right values?"""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from oasis_cli.errors import InputError
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.models.gguf_file import read_gguf_header

Make = Callable[..., PreTrainedModel]
Refusal = Callable[..., str]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # rows of whole blocks of 32
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rotary halves to neighbouring pairs, row by row: what llama.cpp stores."""
    width = weight.shape[0] // heads
    order = [
        head * width + half * width // 2 + i for head in range(heads) for i in range(width // 2) for half in (0, 1)
    ]
    return weight[order]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, Tensor] | None = None,
    scaling: str | None = None,
) -> Path:
    """The model as llama.cpp's converter writes it."""
    config, arch = model.config, {"qwen2": "qwen2"}.get(model.config.model_type, "llama")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for name, tensor in (dict(model.named_parameters()) | (extra or {})).items():
        stem, _, suffix = name.rpartition(".")
        stored = stem
        if stem.startswith("model.layers."):
            block, _, rest = stem.removeprefix("model.layers.").partition(".")
            stored = f"blk.{block}.{NAMES[rest]}"
        elif stem in NAMES:
            stored = NAMES[stem]
        tensor = tensor.detach().float()
        if arch == "llama" and stored.endswith(("attn_q", "attn_k")):
            tensor = interleave(tensor, config.num_attention_heads if stored[-1] == "q" else config.num_key_value_heads)
        own = gguf.GGMLQuantizationType.F32 if tensor.dim() == 1 else kind
        writer.add_tensor(f"{stored}.{suffix}", gguf.quantize(tensor.numpy(), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def llama_gguf(tmp_path: Path, tiny_model: Make) -> Path:
    return write_gguf(tmp_path / "llama.gguf", tiny_model(**WIDE))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back_to_the_bit(tmp_path: Path, tiny_model: Make, family: str, tied: bool) -> None:
    original = tiny_model(family, tie_word_embeddings=tied, **WIDE)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", original))
    assert (checkpoint.kind, checkpoint.name, checkpoint.quantization) == ("gguf", "model", None)
    model = checkpoint.load_model()
    assert model.config.model_type == family
    assert checkpoint.config.architectures == [type(original).__name__]
    assert checkpoint.dtype == checkpoint.config.dtype == torch.float32
    for name, parameter in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], parameter), name
    tokens = torch.tensor([[3, 1, 2]])
    assert torch.allclose(model(tokens).logits, original(tokens).logits, atol=1e-6)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_1", "Q8_0", "Q4_0", "Q5_1"])
def test_blocks_are_dequantized_as_transformers_does(tmp_path: Path, tiny_model: Make, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    original = tiny_model(**WIDE)
    model = open_checkpoint(write_gguf(tmp_path / "model.gguf", original, kind)).load_model()
    reference = type(original).from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    for key, expected in reference.state_dict().items():
        assert torch.equal(model.state_dict()[key], expected), key


def test_loaded_model_is_an_ordinary_one(llama_gguf: Path, tmp_path: Path) -> None:
    open_checkpoint(llama_gguf).load_model().save_pretrained(tmp_path / "saved")
    assert open_checkpoint(tmp_path / "saved").quantization is None


def test_folder_with_one_gguf_file_is_that_file(llama_gguf: Path, refusal: Refusal) -> None:
    assert open_checkpoint(llama_gguf.parent).path == llama_gguf
    llama_gguf.with_name("other.gguf").write_bytes(llama_gguf.read_bytes())
    assert "holds 2 GGUF files; name one of them, such as llama.gguf" in refusal(open_checkpoint, llama_gguf.parent)


def test_digest_does_not_depend_on_the_name(llama_gguf: Path) -> None:
    first = open_checkpoint(llama_gguf).digest
    assert open_checkpoint(llama_gguf.rename(llama_gguf.with_name("b.gguf"))).digest == first


def test_truncation_says_the_bytes(llama_gguf: Path, refusal: Refusal) -> None:
    whole = llama_gguf.read_bytes()
    llama_gguf.write_bytes(whole[:-40])
    assert f"truncated ({len(whole) - 40:,} of {len(whole):,} bytes); download it again" in refusal(
        open_checkpoint, llama_gguf
    )


@pytest.mark.parametrize("size", [0, 3, 4, 10, 24, 30, 200, 900])
def test_file_that_ends_in_its_header(llama_gguf: Path, refusal: Refusal, size: int) -> None:
    llama_gguf.write_bytes(llama_gguf.read_bytes()[:size])
    message = refusal(read_gguf_header, llama_gguf)
    assert ("not a GGUF file" if 0 < size < 4 else "truncated or damaged GGUF file") in message


def test_foreign_files_are_refused(tmp_path: Path, llama_gguf: Path, refusal: Refusal) -> None:
    other = tmp_path / "x.gguf"
    other.write_bytes(b"PK\x03\x04 and so on")
    assert "not a GGUF file" in refusal(open_checkpoint, other)
    other.write_bytes(b"GGUF" + struct.pack("<I", 9) + bytes(64))
    assert "GGUF version 9 is not supported" in refusal(open_checkpoint, other)
    other.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert "does not say its architecture" in refusal(open_checkpoint, other)
    other.write_bytes(llama_gguf.read_bytes().replace(b"llama", b"falcn"))
    assert "architecture 'falcn' is not supported; supported are llama" in refusal(open_checkpoint, other)


def test_tensors_without_a_place_are_refused(tmp_path: Path, tiny_model: Make, refusal: Refusal) -> None:
    """Llama 3's rotary factors: transformers drops them without a word and computes something else."""
    path = write_gguf(tmp_path / "a.gguf", tiny_model(**WIDE), extra={"rope_freqs.weight": torch.ones(8)})
    assert "rope_freqs.weight has no place in a llama model" in refusal(open_checkpoint(path).load_model)
    path = write_gguf(tmp_path / "b.gguf", tiny_model(**WIDE), scaling="yarn")
    assert "scaled rotary positions are not supported in GGUF" in refusal(open_checkpoint, path)


def test_values_that_are_not_finite_are_named(tmp_path: Path, tiny_model: Make, refusal: Refusal) -> None:
    model = tiny_model(**WIDE)
    model.model.layers[1].mlp.up_proj.weight.data[2, 3] = torch.nan
    path = write_gguf(tmp_path / "model.gguf", model)
    assert "model.layers.1.mlp.up_proj.weight holds NaN or infinity" in refusal(open_checkpoint(path).load_model)


@given(position=st.integers(0, 1500), byte=st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_changed_byte_of_the_header_escapes_as_another_error(llama_gguf: Path, position: int, byte: int) -> None:
    data = bytearray(llama_gguf.read_bytes())
    data[position] = byte
    damaged = llama_gguf.with_name("damaged.gguf")
    damaged.write_bytes(data)
    with suppress(InputError):  # any other error fails the test
        read_gguf_header(damaged)


def test_shapes_are_in_torch_order(llama_gguf: Path) -> None:
    header = read_gguf_header(llama_gguf)
    shapes: dict[str, Any] = {tensor.name: tensor.shape for tensor in header.tensors}
    assert shapes["blk.0.ffn_down.weight"] == (64, 96)
    assert shapes["output_norm.weight"] == (64,)
    assert header.metadata["llama.block_count"] == 2
    assert np.prod(shapes["token_embd.weight"]) == 32 * 64
