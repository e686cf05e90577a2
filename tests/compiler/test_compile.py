"""Does the image hold the quantized model, read the way docs/image-format.md says, and is every bad folder refused?"""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaConfig, OPTConfig

from oasis_cli.compiler import source
from oasis_cli.compiler.compile import compile_model
from oasis_cli.compiler.model import read_shape
from oasis_cli.compiler.verify import verify_image
from oasis_cli.errors import CheckError, InputError
from oasis_cli.formats import image
from oasis_cli.hardware.target import load_target

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def quantized(builder: ModuleType, tmp_path: Path) -> Callable[..., Path]:
    def build(changes: dict[str, Any] | None = None, **fields: Any) -> Path:
        folder: Path = builder.write_quantized(tmp_path / "quantized", builder.Recipe(**fields), changes)
        return folder

    return build


def read_from_the_page(path: Path) -> tuple[dict[str, npt.NDArray[Any]], list[dict[str, Any]]]:
    """A reader that knows docs/image-format.md and nothing of the package: sections by name, operations in order."""
    data = path.read_bytes()
    types = {1: "u1", 2: "<i2", 3: "<f2", 4: "<u2", 5: "<f4"}
    sections, names = {}, []
    for start in range(128, 128 + 256 * struct.unpack_from("<I", data, 32)[0], 256):
        name = data[start : start + 128].rstrip(b"\0").decode()
        _, dtype, rank, offset, length, *shape = struct.unpack_from("<HHIQQ4Q", data, start + 128)
        sections[name] = np.frombuffer(data[offset : offset + length], types[dtype]).reshape(shape[:rank])
        names.append(name)
    operations = []
    for row in sections["program"]:
        fields = struct.unpack("<HHi4HHBBB3x6Id8i40x128s", row.tobytes())
        operations.append({
            "opcode": fields[0],
            "K": fields[11],
            "N": fields[12],
            "immediate": fields[17],
            "sections": [names[index] for index in fields[18:26] if index >= 0],
            "name": fields[26].rstrip(b"\0").decode(),
        })  # fmt: skip
    return sections, operations


def test_a_reader_made_from_the_page_finds_the_weights(builder: ModuleType, quantized: Callable[..., Path]) -> None:
    folder = quantized()
    compile_model(folder, folder.parent / "image", "oasis-28nm")
    sections, operations = read_from_the_page(folder.parent / "image" / "model.oimg")
    tensors, layers = builder.quantized_tensors(builder.Recipe())
    gemms = {op["name"]: op for op in operations if op["opcode"] == 4}
    assert set(gemms) == set(layers)
    lines = json.loads(sections["metadata"].tobytes())["target"]["pe_lines"]
    assert lines == 16
    for name, op in gemms.items():
        K, N = op["K"], op["N"]
        indices, lut, codebook, scales = (sections[part] for part in op["sections"])
        row = [n % lines * (N // lines) + min(n % lines, N % lines) + n // lines for n in range(N)]
        nibbles = np.stack([indices[row] & 15, indices[row] >> 4], 2).reshape(N, -1)[:, :K]
        packed = tensors[f"{name}.weight"].numpy()
        for n in range(N):
            for k in range(K):
                assert nibbles[n, k] == packed[n, k // 2] >> 4 * (k % 2) & 15
        assert codebook.tolist() == tensors[f"{name}.weight_codebook"].tolist()
        assert scales.tolist() == tensors[f"{name}.weight_scale"].tolist()
        products = np.outer(tensors[f"{name}.act_codebook"].double(), tensors[f"{name}.weight_codebook"].double())
        assert (lut.reshape(16, 16) * op["immediate"]).tolist() == products.tolist()
    site = "model.layers.0.mlp.gate_proj+up_proj"
    centroids = sections[f"{site}.act_codebook"].astype(np.float64)
    assert sections[f"{site}.boundaries"].tolist() == ((centroids[1:] + centroids[:-1]) / 2).astype("<f4").tolist()
    assert sections["model.embed_tokens.weight"].tolist() == tensors["model.embed_tokens.weight"].tolist()
    assert "lm_head.weight" not in sections
    assert operations[-1]["sections"] == ["model.embed_tokens.weight"]


def test_float16_lut_is_the_rounded_product(builder: ModuleType, quantized: Callable[..., Path]) -> None:
    folder = quantized(codebook_grid="fp16", act_bits=3)
    compile_model(folder, folder.parent / "image", "oasis-28nm")
    sections, _ = read_from_the_page(folder.parent / "image" / "model.oimg")
    act, weight = (
        sections[f"{Q.removesuffix('q_proj')}q_proj+k_proj+v_proj.act_codebook"],
        sections[f"{Q}.weight_codebook"],
    )
    assert (
        sections[f"{Q}.lut"].tolist()
        == np.outer(act.astype("f8"), weight.astype("f8")).astype("<f2").flatten().tolist()
    )


def test_equal_folders_give_equal_images(quantized: Callable[..., Path], tmp_path: Path) -> None:
    folder = quantized()
    first = compile_model(folder, tmp_path / "a", "oasis-28nm")
    moved = folder.rename(tmp_path / "moved")
    second = compile_model(moved, tmp_path / "b", "oasis-28nm")
    for name in ("model.oimg", "image.json"):
        assert (first.out / name).read_bytes() == (second.out / name).read_bytes()


def test_result_and_map_add_up(quantized: Callable[..., Path], tmp_path: Path) -> None:
    result = compile_model(quantized(), tmp_path / "image", "oasis-28nm", emit_hex=True)
    described = json.loads((result.out / "image.json").read_text(encoding="utf-8"))
    assert (described["kind"], described["schema_version"], described["file"]["bytes"]) == (
        "image", 1, result.image.stat().st_size,
    )  # fmt: skip
    assert result.file_bytes == described["file"]["bytes"]
    assert sum(result.section_bytes.values()) == sum(section["length"] for section in described["sections"])
    # two blocks of q 32x16, k and v 16x16, o 16x32, gate and up 23x16, down 16x23: half a byte each, odd K rounded up
    assert result.section_bytes["indices"] == 2 * (32 * 8 + 2 * 16 * 8 + 16 * 16 + 2 * 23 * 8 + 16 * 12)
    assert len(list((result.out / "hex").iterdir())) == result.sections == len(described["sections"])
    assert (result.out / "hex" / "0000-program.hex").read_text(encoding="ascii").splitlines()[:3] == ["01", "00", "00"]
    gemm = next(op for op in described["program"] if op["name"] == DOWN and op["opcode"] == "lut_gemm")
    assert (gemm["K"], gemm["N"], gemm["sections"]["indices"]) == (23, 16, f"{DOWN}.indices")


def test_tokenizer_files_come_along_and_are_checked(quantized: Callable[..., Path], tmp_path: Path) -> None:
    result = compile_model(quantized(), tmp_path / "image", "oasis-28nm")
    verify_image(result.out)
    (result.out / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"tokenizer\.json: differs"):
        verify_image(result.out)


def test_verify_against_the_model_it_came_from(
    builder: ModuleType, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    folder = quantized(dtype=torch.bfloat16, tied=False, outlier_mode="static")
    result = compile_model(folder, tmp_path / "image", "oasis-28nm")
    check = verify_image(result.out, folder)
    assert (check.layers, check.sections, check.file_bytes) == (14, result.sections, result.file_bytes)
    assert verify_image(result.image).layers == 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{DOWN}.weight", lambda t: t ^ 1),
        (f"{Q}.weight_codebook", lambda t: t * 0),
        (f"{Q}.weight_scale", lambda t: t + 1),
        ("model.norm.weight", lambda t: -t),
        ("model.embed_tokens.weight", lambda t: t.flip(0)),
    ],
)
def test_verify_refuses_another_model(
    builder: ModuleType, quantized: Callable[..., Path], tmp_path: Path, name: str, change: Any
) -> None:
    result = compile_model(quantized(), tmp_path / "image", "oasis-28nm")
    tensors, _ = builder.quantized_tensors(builder.Recipe())
    other = builder.write_quantized(tmp_path / "other", builder.Recipe(), {name: change(tensors[name])})
    with pytest.raises(CheckError, match=rf"section {name.rpartition('.')[0]}\.\w+ differs"):
        verify_image(result.out, other)


def test_verify_refuses_a_model_of_another_shape(
    builder: ModuleType, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    result = compile_model(quantized(), tmp_path / "image", "oasis-28nm")
    other = builder.write_quantized(tmp_path / "other", builder.Recipe(vocab=41))
    with pytest.raises(CheckError, match="compiled from another model"):
        verify_image(result.out, other)


def test_verify_refuses_a_map_of_another_image(quantized: Callable[..., Path], tmp_path: Path) -> None:
    result = compile_model(quantized(), tmp_path / "image", "oasis-28nm")
    text = (result.out / "image.json").read_text(encoding="utf-8")
    (result.out / "image.json").write_text(text.replace('"offset": 8192', '"offset": 8193'), encoding="utf-8")
    with pytest.raises(InputError, match=r"image\.json: does not describe model\.oimg"):
        verify_image(result.out)


def test_other_lines_give_another_order(quantized: Callable[..., Path], tmp_path: Path) -> None:
    target = load_target("oasis-28nm")
    few = replace(target, pe_line=replace(target.pe_line, count=3))
    folder = quantized(blocks=1)
    result = compile_model(folder, tmp_path / "image", few)
    assert verify_image(result.out, folder).layers == 7
    sections, _ = read_from_the_page(result.image)
    packed = compile_model(folder, tmp_path / "usual", target)
    usual, _ = read_from_the_page(packed.image)
    assert sections[f"{Q}.indices"].tolist() != usual[f"{Q}.indices"].tolist()
    assert sections[f"{Q}.indices"][1].tolist() == usual[f"{Q}.indices"][3 * 2].tolist()  # channel 3


def test_an_occupied_place_is_kept(quantized: Callable[..., Path], tmp_path: Path) -> None:
    folder = quantized(blocks=1)
    compile_model(folder, tmp_path / "image", "oasis-28nm")
    with pytest.raises(InputError, match="pass --overwrite"):
        compile_model(folder, tmp_path / "image", "oasis-28nm")
    compile_model(folder, tmp_path / "image", "oasis-28nm", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(InputError, match="something else"):
        compile_model(folder, tmp_path / "mine", "oasis-28nm", overwrite=True)


def _weight(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[-1] = value
        return changed

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{Q}.weight", None, f"the weights lack {Q}.weight"),
        (f"{Q}.weight", lambda t: t.float(), "is F32"),
        (f"{Q}.weight", lambda t: t[:, :-1], r"uint8 \[32, 8\] is due"),
        (f"{DOWN}.weight", _weight(0x10), "last half byte"),
        (f"{Q}.weight_codebook", _weight(-99.0), "descends"),
        (f"{Q}.weight_codebook", lambda t: t + torch.linspace(0, 0.01, 16).half(), "does not fit the codebooks"),
        (f"{Q}.codebook_steps", lambda t: t * 0, "must be positive"),
        (f"{Q}.weight_scale", _weight(float("nan")), "NaN or infinity"),
        (f"{Q}.act_codebook", lambda t: t * 0, "share a site but not its codebook"),
        ("model.norm.weight", _weight(float("inf")), r"model\.norm\.weight holds NaN or infinity"),
        ("model.norm.weight", lambda t: t.double(), "is F64"),
        ("model.embed_tokens.weight", lambda t: t[1:], r"float \[40, 16\] is due"),
        ("model.layers.0.extra", lambda _: torch.ones(2), "no place for model.layers.0.extra"),
        ("lm_head.weight", lambda _: torch.ones(40, 16), "differs from the embedding that it is tied to"),
    ],
)
def test_bad_folders_are_refused(
    builder: ModuleType, quantized: Callable[..., Path], tmp_path: Path, name: str, change: Any, message: str
) -> None:
    tensors, _ = builder.quantized_tensors(builder.Recipe())
    changed = None if change is None else change(tensors.get(name))
    folder = quantized({name: changed})
    with pytest.raises(InputError, match=message) as error:
        compile_model(folder, tmp_path / "image", "oasis-28nm")
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quantized"]  # nothing half-written


def test_thresholds_that_cross(builder: ModuleType, quantized: Callable[..., Path], tmp_path: Path) -> None:
    folder = quantized({f"{Q}.act_thresholds": torch.tensor([1.0, -1.0])}, outlier_mode="static")
    with pytest.raises(InputError, match="act_thresholds: lower above upper"):
        compile_model(folder, tmp_path / "image", "oasis-28nm")


def test_products_beyond_float16(builder: ModuleType, quantized: Callable[..., Path], tmp_path: Path) -> None:
    large = torch.full((16,), 300.0).half()
    names = [f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv"]
    folder = quantized(
        {f"{Q}.weight_codebook": large} | {f"{name}.act_codebook": large for name in names}, codebook_grid="fp16"
    )
    with pytest.raises(InputError, match=r"weight_codebook: products beyond float16; .* --codebook-grid int8"):
        compile_model(folder, tmp_path / "image", "oasis-28nm")


def test_large_tensors_are_read_a_few_rows_at_a_time(
    quantized: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantized(tied=False)
    whole = compile_model(folder, tmp_path / "whole", "oasis-28nm")
    monkeypatch.setattr(source, "_BLOCK_BYTES", 3 * 16 * 4)
    pieces = compile_model(folder, tmp_path / "pieces", "oasis-28nm")
    assert whole.image.read_bytes() == pieces.image.read_bytes()


def test_the_shape_names_what_it_supports() -> None:
    with pytest.raises(InputError, match="here: oasis compile supports llama, mistral, qwen2, not opt"):
        read_shape(OPTConfig(), "here")
    with pytest.raises(InputError, match="'gelu' is not supported"):
        read_shape(LlamaConfig(hidden_act="gelu"), "here")


def test_an_index_beyond_the_codebook(builder: ModuleType, quantized: Callable[..., Path], tmp_path: Path) -> None:
    tensors, _ = builder.quantized_tensors(builder.Recipe(weight_bits=3))
    folder = quantized({f"{Q}.weight": tensors[f"{Q}.weight"] | 0x08}, weight_bits=3)
    with pytest.raises(InputError, match="an index beyond the 8 centroids"):
        compile_model(folder, tmp_path / "image", "oasis-28nm")


def test_an_equal_head_beside_a_tied_embedding_is_dropped(
    builder: ModuleType, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    tensors, _ = builder.quantized_tensors(builder.Recipe())
    folder = quantized({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    result = compile_model(folder, tmp_path / "image", "oasis-28nm")
    assert "lm_head.weight" not in {
        section["name"] for section in json.loads((result.out / "image.json").read_text(encoding="utf-8"))["sections"]
    }


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"gpt2.*llama, mistral, qwen2"),
        ({"quantization_config": None}, "not quantized; run oasis quantize"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic' are not supported",
        ),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"intermediate_size": 24}, "the configuration asks for"),
    ],
)
def test_unsupported_models_are_named(
    quantized: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = quantized(blocks=1)
    _edit_config(folder, **changes)
    with pytest.raises(InputError, match=message):
        compile_model(folder, tmp_path / "image", "oasis-28nm")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        compile_model(tmp_path / "absent", tmp_path / "image", "oasis-28nm")


def test_truncated_weights(quantized: Callable[..., Path], tmp_path: Path) -> None:
    folder = quantized(blocks=1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(InputError, match="truncated"):
        compile_model(folder, tmp_path / "image", "oasis-28nm")


def test_a_full_disk_leaves_nothing(
    quantized: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder = quantized(blocks=1)
    monkeypatch.setattr(image, "_write_section", full)
    with pytest.raises(InputError, match="no space left on device"):
        compile_model(folder, tmp_path / "image", "oasis-28nm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quantized"]


def test_flipped_bits_of_a_compiled_image(quantized: Callable[..., Path], tmp_path: Path) -> None:
    result = compile_model(quantized(blocks=1), tmp_path / "image", "oasis-28nm")
    good = result.image.read_bytes()
    generator = np.random.default_rng(7)
    for position in [*range(0, 512, 16), *generator.integers(0, len(good), 80).tolist()]:
        data = bytearray(good)
        data[position] ^= 1 << int(generator.integers(8))
        result.image.write_bytes(data)
        with pytest.raises(InputError) as error:
            verify_image(result.out)
        assert "\n" not in str(error.value)
