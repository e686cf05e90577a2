"""The program of a decoder-only model, from its shape alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from oasis_cli.formats.program import ModelShape, Opcode, Operation
from oasis_cli.numerics.outlier_count import outlier_count

# The register map. A register holds one tensor of the running window; RESIDUAL lives through the whole program.
RESIDUAL, NORMED, QUANTIZED, QUERY, KEY, VALUE, ATTENDED, GATE, UP, OUTPUT = range(10)


@dataclass(frozen=True)
class BlockNames:
    """How an architecture names the modules of its blocks."""

    block: str
    attention_norm: str
    output: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    final_norm: str


LLAMA_NAMES = BlockNames(
    block="model.layers.{}.",
    attention_norm="input_layernorm",
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    final_norm="model.norm",
)
OPT_NAMES = BlockNames(
    block="model.decoder.layers.{}.",
    attention_norm="self_attn_layer_norm",
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    gate="",
    up="fc1",
    down="fc2",
    final_norm="model.decoder.final_layer_norm",
)


@dataclass(frozen=True)
class _Builder:
    shape: ModelShape
    names: BlockNames
    weight_bits: int
    act_bits: int
    outlier_fraction: float
    scale_kind: str
    dynamic: bool

    def operations(self) -> Iterator[Operation]:
        shape = self.shape
        prefix = "model." if shape.rope else "model.decoder."
        yield Operation(Opcode.EMBED, f"{prefix}embed_tokens", destination=RESIDUAL, K=shape.vocab, N=shape.hidden)
        for block in range(shape.blocks):
            yield from self._attention(block)
            yield from self._mlp(block)
        yield self._norm(self.names.final_norm, -1)
        yield Operation(
            Opcode.DENSE_GEMM, "lm_head", sources=(NORMED,), destination=OUTPUT, K=shape.hidden, N=shape.vocab
        )

    def _attention(self, block: int) -> Iterator[Operation]:
        shape, at = self.shape, self.names.block.format(block)
        yield self._norm(at + self.names.attention_norm, block)
        yield self._quantize(f"{at}self_attn.q_proj+k_proj+v_proj", block, NORMED, shape.hidden)
        widths = {"q": (QUERY, shape.attention_width), "k": (KEY, shape.kv_width), "v": (VALUE, shape.kv_width)}
        for letter, (register, width) in widths.items():
            yield self._gemm(f"{at}self_attn.{letter}_proj", block, register, shape.hidden, width, shape.attention_bias)
        if shape.rope:
            yield self._rope(f"{at}self_attn.q_rope", block, QUERY, shape.heads)
            yield self._rope(f"{at}self_attn.k_rope", block, KEY, shape.kv_heads)
        yield Operation(
            Opcode.ATTENTION,
            f"{at}self_attn.attention",
            block,
            (QUERY, KEY, VALUE),
            ATTENDED,
            N=shape.attention_width,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            immediate=shape.head_dim**-0.5,
        )
        output = at + self.names.output
        yield self._quantize(output, block, ATTENDED, shape.attention_width)
        yield self._gemm(output, block, OUTPUT, shape.attention_width, shape.hidden, shape.output_bias)
        yield self._add(f"{at}self_attn.residual", block)

    def _mlp(self, block: int) -> Iterator[Operation]:
        shape, at = self.shape, self.names.block.format(block)
        up, down = at + self.names.up, at + self.names.down
        yield self._norm(at + self.names.mlp_norm, block)
        if shape.glu:
            site = f"{at}{self.names.gate}+{self.names.up.rpartition('.')[2]}"
            yield self._quantize(site, block, NORMED, shape.hidden)
            yield self._gemm(at + self.names.gate, block, GATE, shape.hidden, shape.intermediate, shape.mlp_bias)
        else:
            yield self._quantize(up, block, NORMED, shape.hidden)
        yield self._gemm(up, block, UP, shape.hidden, shape.intermediate, shape.mlp_bias)
        yield Operation(
            Opcode.GLU,
            f"{at}activation",
            block,
            (GATE, UP) if shape.glu else (UP,),
            UP,
            N=shape.intermediate,
            variant=shape.activation,
        )
        yield self._quantize(down, block, UP, shape.intermediate)
        yield self._gemm(down, block, OUTPUT, shape.intermediate, shape.hidden, shape.mlp_bias)
        yield self._add(f"{at}mlp.residual", block)

    def _norm(self, name: str, block: int) -> Operation:
        kind = self.shape.norm_kind
        return Operation(
            Opcode.NORM, name, block, (RESIDUAL,), NORMED, N=self.shape.hidden, bias=kind == "layer", variant=kind
        )

    def _quantize(self, name: str, block: int, source: int, K: int) -> Operation:
        return Operation(
            Opcode.QUANTIZE,
            name,
            block,
            (source,),
            QUANTIZED,
            K=K,
            act_bits=self.act_bits,
            outliers=self._outliers(K),
            variant=self.scale_kind,
        )

    def _gemm(self, name: str, block: int, register: int, K: int, N: int, bias: bool) -> Operation:
        return Operation(
            Opcode.LUT_GEMM,
            name,
            block,
            (QUANTIZED,),
            register,
            K=K,
            N=N,
            weight_bits=self.weight_bits,
            act_bits=self.act_bits,
            outliers=self._outliers(K),
            bias=bias,
        )

    def _rope(self, name: str, block: int, register: int, heads: int) -> Operation:
        width = heads * self.shape.head_dim
        return Operation(
            Opcode.ROPE,
            name,
            block,
            (register,),
            register,
            N=width,
            heads=heads,
            kv_heads=heads,
            head_dim=self.shape.head_dim,
            immediate=1.0,
        )

    def _add(self, name: str, block: int) -> Operation:
        return Operation(Opcode.ADD, name, block, (RESIDUAL, OUTPUT), RESIDUAL, N=self.shape.hidden)

    def _outliers(self, K: int) -> int:
        return outlier_count(K, self.outlier_fraction) if self.dynamic else 0


def build_program(
    shape: ModelShape,
    weight_bits: int,
    act_bits: int,
    outlier_fraction: float,
    *,
    scale_kind: str = "absmax",
    outlier_mode: str = "dynamic",
) -> tuple[Operation, ...]:
    """Every operation of one forward pass, in the order in which they run.

    Registers are a fixed map (see the constants of this module), reused from block to block. The norms' epsilon and
    the LUTs' step are left 0: they belong to weights, which a shape has none of.

    Args:
        shape: the model; LLaMA-like, or OPT-like with `glu=False`, `rope=False`.
        weight_bits: n_W, 1 to 8.
        act_bits: n_A, 1 to 8.
        outlier_fraction: share of the channels that each tree pops, rounded up to a count a site (§III-A: 0.005).
        scale_kind: token scale: absmax, rms, mean_abs or inlier_absmax.
        outlier_mode: "dynamic" (Orizuru), "static" (thresholds) or "none"; only dynamic has a count.

    Raises:
        ValueError: if a number or kind is out of range.
    """
    if outlier_mode not in ("dynamic", "static", "none"):
        raise ValueError(f"outlier_mode must be dynamic, static or none, got {outlier_mode!r}")
    names = LLAMA_NAMES if shape.glu else OPT_NAMES
    builder = _Builder(shape, names, weight_bits, act_bits, outlier_fraction, scale_kind, outlier_mode == "dynamic")
    return tuple(builder.operations())
