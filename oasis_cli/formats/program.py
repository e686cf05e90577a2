"""The program of an image: the operations that the memory controller walks, and their fixed-size descriptors.

Needs no tensor library: the timing model plans with the same operations, from shapes alone.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from oasis_cli.errors import InputError

DESCRIPTOR_BYTES: Final = 256
NAME_BYTES: Final = 128
MAX_SOURCES: Final = 4
MAX_SECTIONS: Final = 8
NO_SECTION: Final = -1
MAX_REGISTER: Final = 0xFFFE
_NO_REGISTER: Final = 0xFFFF
_FLAG_BIAS: Final = 1
# opcode, flags, block, sources, destination, variant, bits of weights and activations, reserved, K, N, heads,
# kv_heads, head_dim, outliers, immediate, sections, reserved, name: in this order, without gaps
_LAYOUT: Final = struct.Struct(f"<HHi{MAX_SOURCES}HHBBB3xIIIIIId{MAX_SECTIONS}i40x{NAME_BYTES}s")
if _LAYOUT.size != DESCRIPTOR_BYTES:
    raise RuntimeError(f"descriptor layout is {_LAYOUT.size} bytes, not {DESCRIPTOR_BYTES}")


class Opcode(IntEnum):
    """What an operation does; zero is never an opcode, so cleared memory is no program."""

    EMBED = 1
    NORM = 2
    QUANTIZE = 3
    LUT_GEMM = 4
    DENSE_GEMM = 5
    ROPE = 6
    ATTENTION = 7
    GLU = 8
    ADD = 9


@dataclass(frozen=True)
class OpcodeRule:
    """What an opcode asks of its operation.

    Attributes:
        sources: smallest and largest number of source registers.
        positive: fields that must be above zero; every other size must be zero.
        variants: what the opcode comes in; the position is the code on disk. Empty: it comes in one kind only.
        sections: what the section references mean, by position.
    """

    sources: tuple[int, int]
    positive: tuple[str, ...]
    variants: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()


RULES: Final[dict[Opcode, OpcodeRule]] = {
    Opcode.EMBED: OpcodeRule((0, 0), ("K", "N"), sections=("table",)),
    Opcode.NORM: OpcodeRule((1, 1), ("N",), ("rms", "layer"), ("weight", "bias")),
    Opcode.QUANTIZE: OpcodeRule(
        (1, 1),
        ("K", "act_bits"),
        ("absmax", "rms", "mean_abs", "inlier_absmax"),
        ("codebook", "boundaries", "thresholds"),
    ),
    Opcode.LUT_GEMM: OpcodeRule(
        (1, 1), ("K", "N", "weight_bits", "act_bits"), sections=("indices", "lut", "codebook", "scales", "bias")
    ),
    Opcode.DENSE_GEMM: OpcodeRule((1, 1), ("K", "N"), sections=("weight", "bias")),
    Opcode.ROPE: OpcodeRule((1, 1), ("N", "heads", "kv_heads", "head_dim"), sections=("inverse_frequencies",)),
    Opcode.ATTENTION: OpcodeRule((3, 3), ("N", "heads", "kv_heads", "head_dim")),
    Opcode.GLU: OpcodeRule((1, 2), ("N",), ("silu", "relu", "gelu", "gelu_tanh")),
    Opcode.ADD: OpcodeRule((2, 2), ("N",)),
}
_SIZES: Final = ("K", "N", "heads", "kv_heads", "head_dim", "weight_bits", "act_bits")


@dataclass(frozen=True)
class Operation:
    """One step of the program.

    Attributes:
        opcode: what it does.
        name: the module that it computes, for people and reports.
        block: decoder block, -1 outside of the blocks.
        sources: registers read: EMBED none (the tokens), ATTENTION query, key, value; GLU gate and up, or one register
            for a plain activation; ADD the residual first.
        destination: register written.
        K: input channels (EMBED: vocabulary; QUANTIZE: width of the site).
        N: output channels (NORM, ADD, GLU: the width; ROPE, ATTENTION: heads × head_dim of the output).
        heads: query heads (ROPE: heads of the rotated register).
        kv_heads: key and value heads (ROPE: as `heads`).
        head_dim: channels of a head.
        weight_bits: bits of a weight index, LUT_GEMM only.
        act_bits: bits of an activation index, QUANTIZE and LUT_GEMM.
        outliers: how many Orizuru pops from each of its two trees, QUANTIZE and LUT_GEMM; 0 for static thresholds.
        bias: whether a bias is added, GEMMs and NORM.
        variant: one of the opcode's kinds: NORM "rms" or "layer", QUANTIZE the token scale, GLU the activation.
        immediate: a number of the operation: NORM epsilon, ROPE scaling of cosine and sine, ATTENTION softmax
            scale, LUT_GEMM the step of the LUT; 0 otherwise.
        sections: indices into the image's section table, by the roles of `RULES`; -1 for a role left out, the empty
            tuple outside of images.

    Raises:
        ValueError: if the fields contradict the opcode.
    """

    opcode: Opcode
    name: str
    block: int = -1
    sources: tuple[int, ...] = ()
    destination: int = 0
    K: int = 0
    N: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    weight_bits: int = 0
    act_bits: int = 0
    outliers: int = 0
    bias: bool = False
    variant: str = ""
    immediate: float = 0.0
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if fault := _find_fault(self):
            raise ValueError(f"operation {self.name!r} ({Opcode(self.opcode).name}): {fault}")


def _find_fault(op: Operation) -> str | None:
    rule = RULES[op.opcode]
    few, many = rule.sources
    if not few <= len(op.sources) <= many:
        return f"{len(op.sources)} source registers, it takes {few} to {many}"
    if not all(0 <= register <= MAX_REGISTER for register in (*op.sources, op.destination)):
        return f"registers must lie in 0..{MAX_REGISTER}, got {(*op.sources, op.destination)}"
    for field in _SIZES:
        size = getattr(op, field)
        if (size > 0) != (field in rule.positive):
            return f"{field} = {size} does not fit the operation"
    return _find_number_fault(op, rule) or _find_reference_fault(op, rule)


def _find_number_fault(op: Operation, rule: OpcodeRule) -> str | None:
    if max(op.K, op.N, op.heads, op.kv_heads, op.head_dim, op.outliers) > 0xFFFFFFFF:
        return "a size beyond 32 bits"
    if max(op.weight_bits, op.act_bits) > 8:
        return f"at most 8 bits an index, got {op.weight_bits} and {op.act_bits}"
    if op.outliers and op.opcode not in (Opcode.QUANTIZE, Opcode.LUT_GEMM):
        return "outliers outside of QUANTIZE and LUT_GEMM"
    if not 0 <= 2 * op.outliers <= max(op.K, 0):
        return f"outliers = {op.outliers} a side of K = {op.K}"
    if op.heads and (op.heads % op.kv_heads or op.heads * op.head_dim != op.N):
        return f"{op.heads} heads of {op.head_dim} over {op.kv_heads} key/value heads do not make N = {op.N}"
    if op.bias and op.opcode not in (Opcode.LUT_GEMM, Opcode.DENSE_GEMM, Opcode.NORM):
        return "a bias outside of GEMMs and norms"
    if op.variant not in (rule.variants or ("",)):
        return f"variant {op.variant!r}, known are {', '.join(rule.variants) or 'none'}"
    if not math.isfinite(op.immediate):
        return f"immediate = {op.immediate}"
    return None


def _find_reference_fault(op: Operation, rule: OpcodeRule) -> str | None:
    if not -1 <= op.block < 2**31:
        return f"block = {op.block}"
    if len(op.sections) > len(rule.sections) or any(not -1 <= section < 2**31 for section in op.sections):
        return f"section references {op.sections}, it takes {', '.join(rule.sections) or 'none'}"
    encoded = op.name.encode()
    if not 0 < len(encoded) <= NAME_BYTES or not op.name.isprintable():
        return f"a name must have 1 to {NAME_BYTES} printable bytes"
    return None


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model, enough to plan its program.

    Attributes:
        name: what reports call it.
        hidden: channels of the residual stream.
        intermediate: channels inside the feed-forward network.
        blocks: decoder blocks.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: channels of a head.
        vocab: rows of the embedding.
        tied: whether the output head is the embedding.
        attention_bias: whether q, k and v have a bias.
        max_positions: longest context.
        glu: gated feed-forward network (gate, up, down); False for two layers with an activation between (OPT).
        norm_kind: "rms" or "layer"; "layer" norms have a bias.
        activation: "silu", "relu", "gelu" or "gelu_tanh".
        output_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the feed-forward layers have a bias.
        rope: rotary positions; False for a learnt position table, which is added within the embedding (OPT).

    Raises:
        ValueError: if a size is not positive, heads do not divide, or a kind is unknown.
    """

    name: str
    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    attention_bias: bool = False
    max_positions: int = 2048
    glu: bool = True
    norm_kind: str = "rms"
    activation: str = "silu"
    output_bias: bool = False
    mlp_bias: bool = False
    rope: bool = True

    def __post_init__(self) -> None:
        for field in ("hidden", "intermediate", "blocks", "heads", "kv_heads", "head_dim", "vocab", "max_positions"):
            if getattr(self, field) < 1:
                raise ValueError(f"shape {self.name!r}: {field} must be positive, got {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"shape {self.name!r}: {self.kv_heads} key/value heads do not divide {self.heads} heads")
        if self.norm_kind not in RULES[Opcode.NORM].variants:
            raise ValueError(f"shape {self.name!r}: norm_kind must be rms or layer, got {self.norm_kind!r}")
        if self.activation not in RULES[Opcode.GLU].variants:
            raise ValueError(f"shape {self.name!r}: unknown activation {self.activation!r}")

    @property
    def attention_width(self) -> int:
        """Channels of all query heads together; not always `hidden`."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key (or value) heads together."""
        return self.kv_heads * self.head_dim


def encode_operation(op: Operation) -> bytes:
    """The descriptor of an operation, `DESCRIPTOR_BYTES` little-endian bytes."""
    variants = RULES[op.opcode].variants
    return _LAYOUT.pack(
        op.opcode,
        _FLAG_BIAS if op.bias else 0,
        op.block,
        *op.sources,
        *(_NO_REGISTER,) * (MAX_SOURCES - len(op.sources)),
        op.destination,
        variants.index(op.variant) if variants else 0,
        op.weight_bits,
        op.act_bits,
        *(op.K, op.N, op.heads, op.kv_heads, op.head_dim, op.outliers),
        op.immediate,
        *op.sections,
        *(NO_SECTION,) * (MAX_SECTIONS - len(op.sections)),
        op.name.encode(),
    )


def decode_operation(data: bytes, where: str) -> Operation:
    """Read one descriptor.

    Args:
        data: `DESCRIPTOR_BYTES` bytes.
        where: what an error message opens with, e.g. "model.oimg: operation 3".

    Raises:
        InputError: if any field, or the padding, is not what `encode_operation` writes.
    """
    try:
        op = _unpack(data)
        if encode_operation(op) != data:  # reserved bytes, unknown flags, a second spelling of the same operation
            raise ValueError("reserved bits are set")
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise InputError(f"{where}: damaged operation ({error}); run oasis compile again") from error
    return op


def _unpack(data: bytes) -> Operation:
    opcode_value, flags, block, *rest = _LAYOUT.unpack(data)
    opcode = Opcode(opcode_value)
    sources, rest = rest[:MAX_SOURCES], rest[MAX_SOURCES:]
    destination, variant, weight_bits, act_bits, K, N, heads, kv_heads, head_dim, outliers, immediate, *rest = rest
    sections, name = rest[:MAX_SECTIONS], rest[MAX_SECTIONS]
    rule = RULES[opcode]
    return Operation(
        opcode=opcode,
        name=name.rstrip(b"\0").decode(),
        block=block,
        sources=tuple(register for register in sources if register != _NO_REGISTER),
        destination=destination,
        K=K,
        N=N,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        weight_bits=weight_bits,
        act_bits=act_bits,
        outliers=outliers,
        bias=flags == _FLAG_BIAS,
        variant=rule.variants[variant] if rule.variants else "",
        immediate=immediate,
        sections=_trim(sections, rule),
    )


def _trim(sections: Sequence[int], rule: OpcodeRule) -> tuple[int, ...]:
    # an image fills every role of the opcode; a program made from shapes alone refers to nothing
    if all(section == NO_SECTION for section in sections):
        return ()
    return tuple(sections[: len(rule.sections)])


def encode_program(operations: Sequence[Operation]) -> bytes:
    """The program section: one descriptor an operation, one after the other."""
    return b"".join(encode_operation(op) for op in operations)


def decode_program(data: bytes, where: str) -> tuple[Operation, ...]:
    """Read a program section.

    Args:
        data: the whole section.
        where: the file, for messages.

    Raises:
        InputError: if the length is no multiple of a descriptor, or a descriptor is damaged.
    """
    if not data or len(data) % DESCRIPTOR_BYTES:
        raise InputError(
            f"{where}: the program has {len(data)} bytes, no multiple of {DESCRIPTOR_BYTES}; run oasis compile again"
        )
    starts = range(0, len(data), DESCRIPTOR_BYTES)
    return tuple(
        decode_operation(data[start : start + DESCRIPTOR_BYTES], f"{where}: operation {number}")
        for number, start in enumerate(starts)
    )
