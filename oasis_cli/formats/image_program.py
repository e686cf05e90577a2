"""Does the program of an image fit its sections and its registers? Checked before anything runs."""

from collections.abc import Callable, Sequence
from typing import Final

from oasis_cli.errors import InputError
from oasis_cli.formats.image_table import CURE, Section, SectionKind, SectionType
from oasis_cli.formats.program import NO_SECTION, RULES, Opcode, Operation

_FLOATS: Final = (SectionType.F16, SectionType.BF16, SectionType.F32)
_Demand = tuple[SectionKind, tuple[SectionType, ...], Callable[[Operation], tuple[int, ...]]]

# what each role of an opcode's section references must be: kind, types, shape
_DEMANDS: Final[dict[tuple[Opcode, str], _Demand]] = {
    (Opcode.EMBED, "table"): (SectionKind.DENSE, _FLOATS, lambda op: (op.K, op.N)),
    (Opcode.NORM, "weight"): (SectionKind.DENSE, _FLOATS, lambda op: (op.N,)),
    (Opcode.NORM, "bias"): (SectionKind.BIAS, _FLOATS, lambda op: (op.N,)),
    (Opcode.QUANTIZE, "codebook"): (SectionKind.CODEBOOK, (SectionType.F16,), lambda op: (1 << op.act_bits,)),
    (Opcode.QUANTIZE, "boundaries"): (
        SectionKind.BOUNDARIES,
        (SectionType.F32,),
        lambda op: ((1 << op.act_bits) - 1,),
    ),
    (Opcode.QUANTIZE, "thresholds"): (SectionKind.THRESHOLDS, (SectionType.F32,), lambda op: (2,)),
    (Opcode.LUT_GEMM, "indices"): (SectionKind.INDICES, (SectionType.U8,), lambda op: (op.N, -(-op.K // 2))),
    (Opcode.LUT_GEMM, "lut"): (
        SectionKind.LUT,
        (SectionType.I16, SectionType.F16),
        lambda op: (1 << (op.act_bits + op.weight_bits),),
    ),
    (Opcode.LUT_GEMM, "codebook"): (SectionKind.CODEBOOK, (SectionType.F16,), lambda op: (1 << op.weight_bits,)),
    (Opcode.LUT_GEMM, "scales"): (SectionKind.SCALES, (SectionType.F16,), lambda op: (op.N,)),
    (Opcode.LUT_GEMM, "bias"): (SectionKind.BIAS, _FLOATS, lambda op: (op.N,)),
    (Opcode.DENSE_GEMM, "weight"): (SectionKind.DENSE, _FLOATS, lambda op: (op.N, op.K)),
    (Opcode.DENSE_GEMM, "bias"): (SectionKind.BIAS, _FLOATS, lambda op: (op.N,)),
    (Opcode.ROPE, "inverse_frequencies"): (
        SectionKind.FREQUENCIES,
        (SectionType.F32,),
        lambda op: (op.head_dim // 2,),
    ),
}
_OPTIONAL: Final = ("bias", "thresholds")


def check_program(operations: Sequence[Operation], sections: Sequence[Section], where: str) -> None:
    """Check every section reference, and that each operation reads registers of the width it takes.

    Args:
        operations: the decoded program.
        sections: the image's section table.
        where: the file, for messages.

    Raises:
        InputError: naming the first operation that cannot run.
    """
    registers: dict[int, tuple[str, int]] = {}
    for op in operations:
        fault = _find_section_fault(op, sections) or _find_register_fault(op, registers)
        if fault:
            raise InputError(f"{where}: operation {op.name}: {fault}; {CURE}")
        width = op.K if op.opcode is Opcode.QUANTIZE else op.N
        registers[op.destination] = (_written(op), width)


def _find_section_fault(op: Operation, sections: Sequence[Section]) -> str | None:
    roles = RULES[op.opcode].sections
    references = op.sections or (NO_SECTION,) * len(roles)
    for role, reference in zip(roles, references, strict=True):
        needed = role not in _OPTIONAL or (role == "bias" and op.bias)
        if reference == NO_SECTION:
            if needed:
                return f"refers to no {role}"
            continue
        if role == "bias" and not op.bias:
            return "refers to a bias that it does not add"
        if reference >= len(sections):
            return f"its {role} is section {reference} of {len(sections)}"
        kind, types, shape = _DEMANDS[op.opcode, role]
        found = sections[reference]
        if found.kind is not kind or found.dtype not in types or found.shape != shape(op):
            return f"its {role} cannot be section {found.name}"
    return None


def _find_register_fault(op: Operation, registers: dict[int, tuple[str, int]]) -> str | None:
    for source, width in zip(op.sources, _source_widths(op), strict=True):
        kind = "indices" if op.opcode is Opcode.LUT_GEMM else "values"
        if registers.get(source) != (kind, width):
            return f"register {source} does not hold {width} {kind}"
    return None


def _written(op: Operation) -> str:
    return "indices" if op.opcode is Opcode.QUANTIZE else "values"


def _source_widths(op: Operation) -> tuple[int, ...]:
    if op.opcode is Opcode.ATTENTION:
        kv_width = op.kv_heads * op.head_dim
        return (op.N, kv_width, kv_width)
    reads_channels = op.opcode in (Opcode.QUANTIZE, Opcode.LUT_GEMM, Opcode.DENSE_GEMM)
    return (op.K if reads_channels else op.N,) * len(op.sources)
