"""Does the program of a shape hold what one forward pass takes?"""

import subprocess
import sys
from collections import Counter

import pytest

from oasis_cli.compiler.fit import fit_program
from oasis_cli.compiler.program import build_program
from oasis_cli.errors import InputError
from oasis_cli.formats.program import ModelShape, Opcode, Operation
from oasis_cli.formats.quantized import LayerSpec, QuantizationSpec

SMOL = ModelShape(
    "smollm2", hidden=576, intermediate=1536, blocks=30, heads=9, kv_heads=3, head_dim=64, vocab=49152, tied=True
)
OPT = ModelShape(
    "opt", hidden=768, intermediate=3072, blocks=12, heads=12, kv_heads=12, head_dim=64, vocab=50272, tied=True,
    attention_bias=True, glu=False, norm_kind="layer", activation="relu", output_bias=True, mlp_bias=True, rope=False,
)  # fmt: skip


def by_name(program: tuple[Operation, ...]) -> dict[str, list[Operation]]:
    found: dict[str, list[Operation]] = {}
    for op in program:
        found.setdefault(op.name, []).append(op)
    return found


def test_llama_like_block() -> None:
    program = build_program(SMOL, 4, 4, 0.005)
    kinds = Counter(op.opcode for op in program)
    assert kinds == {
        Opcode.EMBED: 1,
        Opcode.NORM: 61,
        Opcode.QUANTIZE: 120,
        Opcode.LUT_GEMM: 210,
        Opcode.DENSE_GEMM: 1,
        Opcode.ROPE: 60,
        Opcode.ATTENTION: 30,
        Opcode.GLU: 30,
        Opcode.ADD: 60,
    }
    named = by_name(program)
    sizes = {suffix: [(op.K, op.N, op.outliers) for op in named[f"model.layers.29.{suffix}"] if op.N]
             for suffix in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")}  # fmt: skip
    # ceil(0.005 * 576) = 3, ceil(0.005 * 1536) = 8
    assert sizes == {
        "self_attn.k_proj": [(576, 192, 3)],
        "mlp.up_proj": [(576, 1536, 3)],
        "mlp.down_proj": [(1536, 576, 8)],
    }
    assert (program[-1].name, program[-1].K, program[-1].N, program[-1].block) == ("lm_head", 576, 49152, -1)


def test_layers_of_a_site_share_one_quantize() -> None:
    program = [op for op in build_program(SMOL, 4, 3, 0.005) if op.block == 0]
    order = [
        op.name.removeprefix("model.layers.0.") for op in program if op.opcode in (Opcode.QUANTIZE, Opcode.LUT_GEMM)
    ]
    assert order == [
        "self_attn.q_proj+k_proj+v_proj",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "self_attn.o_proj",
        "mlp.gate_proj+up_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "mlp.down_proj",
    ]
    assert {op.act_bits for op in program if op.opcode is Opcode.QUANTIZE} == {3}


def test_opt_like_block_has_no_gate_and_no_rotation() -> None:
    program = build_program(OPT, 4, 4, 0.005)
    kinds = Counter(op.opcode for op in program if op.block == 5)
    assert kinds == {
        Opcode.NORM: 2,
        Opcode.QUANTIZE: 4,
        Opcode.LUT_GEMM: 6,
        Opcode.ATTENTION: 1,
        Opcode.GLU: 1,
        Opcode.ADD: 2,
    }
    assert all(op.bias for op in program if op.opcode in (Opcode.LUT_GEMM, Opcode.NORM))
    (activation,) = [op for op in program if op.block == 5 and op.opcode is Opcode.GLU]
    assert (activation.variant, len(activation.sources), activation.N) == ("relu", 1, 3072)


def test_only_dynamic_outliers_are_counted() -> None:
    for mode in ("static", "none"):
        assert not any(op.outliers for op in build_program(SMOL, 4, 4, 0.005, outlier_mode=mode))
    with pytest.raises(ValueError, match="outlier_mode"):
        build_program(SMOL, 4, 4, 0.005, outlier_mode="sometimes")


def test_the_descriptors_need_no_torch() -> None:
    code = "import sys, oasis_cli.formats.program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


TINY = ModelShape("tiny", hidden=8, intermediate=12, blocks=1, heads=2, kv_heads=1, head_dim=4, vocab=10)


def spec_of(layers: dict[str, tuple[str, int, int]]) -> QuantizationSpec:
    return QuantizationSpec(
        "oasis", layers={f"model.layers.0.{name}": LayerSpec(*entry, 4, 4) for name, entry in layers.items()}
    )


def test_fitting_names_sites_and_keeps_layers_left_alone_dense() -> None:
    spec = spec_of({"self_attn.q_proj": ("my site", 8, 8), "mlp.down_proj": ("other", 12, 8)})
    program = fit_program(build_program(TINY, 4, 4, 0.005), spec, "here")
    assert [op.name for op in program if op.opcode is Opcode.QUANTIZE] == ["my site", "other"]
    dense = [op for op in program if op.opcode is Opcode.DENSE_GEMM]
    assert [op.name.rpartition(".")[2] for op in dense] == [
        "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "lm_head",
    ]  # fmt: skip
    # they read the float register that their site's QUANTIZE would have read
    assert [op.sources for op in dense] == [(1,), (1,), (6,), (1,), (1,), (1,)]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"self_attn.r_proj": ("s", 8, 8)}, "here: the model has no layer model.layers.0.self_attn.r_proj"),
        ({"self_attn.q_proj": ("s", 8, 9)}, r"K, N = \(8, 9\), the configuration asks for \(8, 8\)"),
        ({"self_attn.q_proj": ("s", 8, 8), "self_attn.v_proj": ("t", 8, 4)}, "split into the sites s, t"),
    ],
)
def test_a_specification_that_does_not_fit(layers: dict[str, tuple[str, int, int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_program(build_program(TINY, 4, 4, 0.005), spec_of(layers), "here")
