"""Is a program refused that refers to a wrong section or reads what nobody wrote?"""

from dataclasses import replace
from typing import Any

import pytest

from oasis_cli.errors import InputError
from oasis_cli.formats.image_program import check_program
from oasis_cli.formats.image_table import Section, SectionKind, SectionType
from oasis_cli.formats.program import Opcode, Operation


def section(name: str, kind: SectionKind, dtype: SectionType, *shape: int) -> Section:
    return Section(name, kind, dtype, shape, 4096, bytes(32))


SECTIONS = (
    section("table", SectionKind.DENSE, SectionType.BF16, 9, 5),
    section("codebook", SectionKind.CODEBOOK, SectionType.F16, 8),
    section("boundaries", SectionKind.BOUNDARIES, SectionType.F32, 7),
    section("indices", SectionKind.INDICES, SectionType.U8, 6, 3),
    section("lut", SectionKind.LUT, SectionType.I16, 128),
    section("weights", SectionKind.CODEBOOK, SectionType.F16, 16),
    section("scales", SectionKind.SCALES, SectionType.F16, 6),
    section("bias", SectionKind.BIAS, SectionType.F32, 6),
    section("frequencies", SectionKind.FREQUENCIES, SectionType.F32, 1),
    section("head", SectionKind.DENSE, SectionType.F32, 9, 6),
)
EMBED = Operation(Opcode.EMBED, "embed", destination=0, K=9, N=5, sections=(0,))
QUANTIZE = Operation(
    Opcode.QUANTIZE, "site", sources=(0,), destination=1, K=5, act_bits=3, outliers=1, variant="absmax",
    sections=(1, 2, -1),
)  # fmt: skip
GEMM = Operation(
    Opcode.LUT_GEMM, "layer", sources=(1,), destination=2, K=5, N=6, weight_bits=4, act_bits=3, outliers=1, bias=True,
    sections=(3, 4, 5, 6, 7),
)  # fmt: skip
ROPE = Operation(
    Opcode.ROPE, "rope", sources=(2,), destination=2, N=6, heads=3, kv_heads=3, head_dim=2, immediate=1.0, sections=(8,)
)
ATTENTION = Operation(
    Opcode.ATTENTION, "attention", sources=(2, 2, 2), destination=3, N=6, heads=3, kv_heads=3, head_dim=2
)
HEAD = Operation(Opcode.DENSE_GEMM, "head", sources=(3,), destination=0, K=6, N=9, sections=(9, -1))
PROGRAM = (EMBED, QUANTIZE, GEMM, ROPE, ATTENTION, HEAD)


def test_a_sound_program_passes() -> None:
    check_program(PROGRAM, SECTIONS, "model.oimg")


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, {"sections": ()}, "embed: refers to no table"),
        (0, {"sections": (1,)}, "its table cannot be section codebook"),
        (0, {"N": 6}, "its table cannot be section table"),
        (0, {"sections": (10,)}, "its table is section 10 of 10"),
        (1, {"sections": (1, -1, -1)}, "refers to no boundaries"),
        (1, {"sections": (5, 2, -1)}, "its codebook cannot be section weights"),
        (1, {"sources": (4,)}, "register 4 does not hold 5 values"),
        (2, {"sections": (3, 4, 5, 6, -1)}, "refers to no bias"),
        (2, {"bias": False}, "bias that it does not add"),
        (2, {"sources": (0,)}, "register 0 does not hold 5 indices"),
        (2, {"act_bits": 4}, "its lut cannot be section lut"),
        (3, {"sources": (1,)}, "register 1 does not hold 6 values"),
        (4, {"kv_heads": 1}, "register 2 does not hold 2 values"),
        (5, {"sections": (0, -1)}, "its weight cannot be section table"),
    ],
)
def test_a_wrong_reference_is_named(number: int, change: dict[str, Any], message: str) -> None:
    program = list(PROGRAM)
    program[number] = replace(program[number], **change)
    with pytest.raises(InputError, match=message) as error:
        check_program(program, SECTIONS, "model.oimg")
    assert str(error.value).startswith("model.oimg: operation ")
