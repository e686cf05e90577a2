"""Does a descriptor hold what docs/image-format.md says, and is every other one refused?"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_cli.errors import InputError
from oasis_cli.formats.program import (
    DESCRIPTOR_BYTES,
    NO_SECTION,
    RULES,
    ModelShape,
    Opcode,
    Operation,
    decode_operation,
    decode_program,
    encode_operation,
    encode_program,
)

GEMM = Operation(
    Opcode.LUT_GEMM,
    "model.layers.3.mlp.down_proj",
    block=3,
    sources=(2,),
    destination=9,
    K=1536,
    N=576,
    weight_bits=4,
    act_bits=3,
    outliers=8,
    bias=True,
    immediate=0.5,
    sections=(7, 8, 9, 10, 258),
)
# written by hand from the table in docs/image-format.md
GEMM_BYTES = (
    bytes.fromhex("0400 0100 03000000")  # LUT_GEMM, with a bias, block 3
    + bytes.fromhex("0200 ffff ffff ffff 0900")  # from register 2 to register 9
    + bytes.fromhex("00 04 03 000000")  # no variant, W4A3
    + bytes.fromhex("00060000 40020000")  # K = 1536, N = 576
    + bytes.fromhex("00000000 00000000 00000000 08000000")  # no heads, 8 outliers a side
    + bytes.fromhex("000000000000e03f")  # 0.5
    + bytes.fromhex("07000000 08000000 09000000 0a000000 02010000 ffffffff ffffffff ffffffff")
    + bytes(40)
    + b"model.layers.3.mlp.down_proj".ljust(128, b"\0")
)


def test_descriptor_is_what_the_page_says() -> None:
    assert encode_operation(GEMM) == GEMM_BYTES
    assert decode_operation(GEMM_BYTES, "here") == GEMM
    assert len(GEMM_BYTES) == DESCRIPTOR_BYTES == 256


def _sizes(opcode: Opcode, number: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries(
        {name: st.integers(1, 8) if name.endswith("bits") else number for name in RULES[opcode].positive}
    )


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    opcode = draw(st.sampled_from(Opcode))
    rule = RULES[opcode]
    sizes: dict[str, Any] = draw(_sizes(opcode, st.integers(1, 2**20)))
    if "heads" in sizes:
        sizes["heads"] = sizes["kv_heads"] * draw(st.integers(1, 9))
        sizes["N"] = sizes["heads"] * sizes["head_dim"] % 2**31 or 1
        sizes["head_dim"] = max(1, sizes["N"] // sizes["heads"])
        sizes["N"] = sizes["heads"] * sizes["head_dim"]
    section = st.integers(-1, 2**31 - 1)
    sections = draw(st.tuples(*[section] * len(rule.sections)))
    register = st.integers(0, 0xFFFE)
    return Operation(
        opcode,
        draw(st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=32)),
        block=draw(st.integers(-1, 2**31 - 1)),
        sources=tuple(draw(st.lists(register, min_size=rule.sources[0], max_size=rule.sources[1]))),
        destination=draw(register),
        outliers=draw(st.integers(0, sizes["K"] // 2)) if opcode in (Opcode.QUANTIZE, Opcode.LUT_GEMM) else 0,
        bias=draw(st.booleans()) if opcode in (Opcode.LUT_GEMM, Opcode.DENSE_GEMM, Opcode.NORM) else False,
        variant=draw(st.sampled_from(rule.variants or ("",))),
        immediate=draw(st.floats(allow_nan=False, allow_infinity=False)),
        sections=() if all(section == NO_SECTION for section in sections) else sections,
        **sizes,
    )


@settings(deadline=None)
@given(st.lists(operations(), min_size=1, max_size=3))
def test_programs_round_trip(program: list[Operation]) -> None:
    assert decode_program(encode_program(program), "here") == tuple(program)


@settings(deadline=None)
@given(operations(), st.integers(0, DESCRIPTOR_BYTES * 8 - 1))
def test_a_flipped_bit_gives_another_operation_or_a_refusal(op: Operation, bit: int) -> None:
    """Never the same operation from other bytes: each has one spelling."""
    data = bytearray(encode_operation(op))
    data[bit // 8] ^= 1 << bit % 8
    try:
        found = encode_operation(decode_operation(bytes(data), "here"))
    except InputError:
        return
    assert found == bytes(data)  # compared as bytes: -0.0 equals 0.0


@pytest.mark.parametrize("length", [0, 1, 255, 257])
def test_a_program_is_whole_descriptors(length: int) -> None:
    with pytest.raises(InputError, match="no multiple of 256"):
        decode_program(bytes(length), "model.oimg")


def test_cleared_memory_is_no_program() -> None:
    with pytest.raises(InputError, match=r"model\.oimg: operation 0: damaged"):
        decode_program(bytes(256), "model.oimg")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"K": 0}, "K = 0"),
        ({"heads": 2}, "heads = 2"),
        ({"sources": ()}, "0 source registers"),
        ({"sources": (1, 2)}, "2 source registers"),
        ({"destination": 0xFFFF}, "registers must lie"),
        ({"outliers": 769}, "769 a side of K = 1536"),
        ({"outliers": -1}, "-1 a side"),
        ({"weight_bits": 9}, "at most 8 bits"),
        ({"variant": "rms"}, "variant 'rms'"),
        ({"immediate": float("nan")}, "immediate"),
        ({"N": 2**32}, "beyond 32 bits"),
        ({"block": -2}, "block"),
        ({"sections": (1,) * 6}, "section references"),
        ({"name": ""}, "a name"),
        ({"name": "x" * 129}, "a name"),
        ({"name": "a\nb"}, "a name"),
    ],
)
def test_impossible_operations_are_a_bug(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GEMM, **change)


def test_only_gemms_and_norms_add_a_bias_and_only_quantized_ones_have_outliers() -> None:
    add = Operation(Opcode.ADD, "add", sources=(0, 1), N=4)
    with pytest.raises(ValueError, match="a bias outside"):
        replace(add, bias=True)
    with pytest.raises(ValueError, match="outliers outside"):
        replace(add, outliers=1)
    with pytest.raises(ValueError, match="do not make N"):
        Operation(Opcode.ROPE, "rope", sources=(0,), N=7, heads=2, kv_heads=2, head_dim=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden must be positive"),
        ({"kv_heads": 4}, "do not divide"),
        ({"norm_kind": "batch"}, "norm_kind"),
        ({"activation": "tanh"}, "activation"),
    ],
)
def test_impossible_shapes_are_a_bug(change: dict[str, Any], message: str) -> None:
    shape = ModelShape("m", hidden=8, intermediate=16, blocks=1, heads=6, kv_heads=3, head_dim=4, vocab=32)
    assert (shape.attention_width, shape.kv_width) == (24, 12)
    with pytest.raises(ValueError, match=message):
        replace(shape, **change)
