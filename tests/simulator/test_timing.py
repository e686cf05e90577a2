"""Whole programs: a decode against hand arithmetic, the prompt, the schedules, and reports that add up."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_cli.errors import InputError
from oasis_cli.formats.program import ModelShape, Opcode, Operation
from oasis_cli.hardware.shapes import load_shape
from oasis_cli.hardware.target import UNITS, Target, load_target
from oasis_cli.simulator.cost import Cost, Phase, cost_operation
from oasis_cli.simulator.report import SimulationReport
from oasis_cli.simulator.timing import simulate

PAPER = load_target("oasis-28nm")
SMALL = replace(
    PAPER,
    name="small",
    clock_mhz=800.0,
    pe_line=replace(PAPER.pe_line, count=4, index_counters=8, mac_tree_inputs=16, macs=2),
    hbm=replace(PAPER.hbm, bandwidth_gb_s=256.0),
    rates=replace(PAPER.rates, functional_elements=4),
)
TINY = ModelShape("tiny", hidden=64, intermediate=176, blocks=2, heads=4, kv_heads=2, head_dim=16, vocab=100)
BUFFERS = ("weight_index_buffer", "lut", "activation_index_buffer", "output_buffer")


def build(shape: ModelShape, fraction: float = 0.005, scale_kind: str = "absmax") -> tuple[Operation, ...]:
    """A program as a compiler would make it, written out here so that this page stands alone."""
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ops = [Operation(Opcode.EMBED, "embed", K=shape.vocab, N=shape.hidden)]

    def site(name: str, K: int, outputs: dict[str, int], block: int) -> None:
        k = min(math.ceil(fraction * K), K // 2)
        ops.append(Operation(Opcode.QUANTIZE, name, block, (0,), K=K, act_bits=4, outliers=k, variant=scale_kind))
        for layer, N in outputs.items():
            full = f"blocks.{block}.{layer}"
            ops.append(Operation(Opcode.LUT_GEMM, full, block, (0,), K=K, N=N, weight_bits=4, act_bits=4, outliers=k))

    def vector(opcode: Opcode, N: int, sources: int, variant: str = "") -> None:
        ops.append(Operation(opcode, opcode.name, -1, (0,) * sources, N=N, variant=variant))

    def heads(opcode: Opcode, query: int, kv: int) -> None:
        N, sources = query * shape.head_dim, (0,) * (3 if opcode is Opcode.ATTENTION else 1)
        ops.append(Operation(opcode, "heads", -1, sources, N=N, heads=query, kv_heads=kv, head_dim=shape.head_dim))

    for block in range(shape.blocks):
        vector(Opcode.NORM, shape.hidden, 1, "rms")
        site("qkv", shape.hidden, {"q": width, "k": kv_width, "v": kv_width}, block)
        heads(Opcode.ROPE, shape.heads, shape.heads)
        heads(Opcode.ROPE, shape.kv_heads, shape.kv_heads)
        heads(Opcode.ATTENTION, shape.heads, shape.kv_heads)
        site("o", width, {"o": shape.hidden}, block)
        vector(Opcode.ADD, shape.hidden, 2)
        vector(Opcode.NORM, shape.hidden, 1, "rms")
        site("mlp", shape.hidden, {"gate": shape.intermediate, "up": shape.intermediate}, block)
        vector(Opcode.GLU, shape.intermediate, 2, "silu")
        site("down", shape.intermediate, {"down": shape.hidden}, block)
        vector(Opcode.ADD, shape.hidden, 2)
    vector(Opcode.NORM, shape.hidden, 1, "rms")
    ops.append(Operation(Opcode.DENSE_GEMM, "lm_head", -1, (0,), K=shape.hidden, N=shape.vocab))
    return tuple(ops)


def gemm_by_hand(K: int, N: int, k: int) -> int:
    """A memory-bound GEMM of the paper's chip at M = 1: the stream, then the last group through the pipeline."""
    count, tree = math.ceil(K / 512), 8
    moved = N * K / 2 + 2 * k * N / 2 + 2 * N + 576
    stream = moved / (2039e9 * 0.92 / 500e6)
    first_load = (N * K / 2 + 2 * N + 576) / (N / 16) / 3751.76
    return math.ceil(stream + 1 + 6 + 1 + min(count, tree) + min(first_load, max(count, tree)))


def attention_by_hand(context: int) -> tuple[int, int]:
    """LLaMA-2-7B, one token: 640 products a cycle against the KV cache's stream; softmax at 32 elements a cycle."""
    products = math.ceil(2 * 32 * 128 * context / 640)
    stream = 2 * 32 * 128 * 2 * (context + 1) / 3751.76
    return math.ceil(max(products, stream)), 3 * context


def step_by_hand(context: int) -> tuple[int, int]:
    """Cycles of one LLaMA-2-7B decode step, overlapped and serial."""
    square, wide, long = gemm_by_hand(4096, 4096, 21), gemm_by_hand(4096, 11008, 21), gemm_by_hand(11008, 4096, 56)
    norm, add, rope, glu = 2 * 128, 128, 128, 2 * 344
    site, down_site = 128 + 1024, 344 + 2752
    attention, softmax = attention_by_hand(context)
    runs = [
        (3 * square, 2 * rope),
        (attention, softmax + site),
        (square, add + norm + site),
        (2 * wide, glu + down_site),
        (long, add + norm + site),
    ]
    # the last block's down_proj is followed by the final norm without a site; the embedding by norm and site
    ends = [(3, norm + site), (math.ceil(4096 * 32000 / 640), 0)]
    overlapped = 32 * sum(max(run) for run in runs) + sum(max(run) for run in ends)
    serial = 32 * sum(sum(run) for run in runs) - site + sum(sum(run) for run in ends)
    return overlapped, serial


@pytest.fixture(scope="module")
def llama() -> SimulationReport:
    shape = load_shape("llama-2-7b")
    return simulate(build(shape), shape, PAPER)


def test_one_step_of_llama_2_7b_by_hand() -> None:
    shape = load_shape("llama-2-7b")
    report = simulate(build(shape), shape, PAPER, prefill=999, decode=1)
    phase = report.phases[1]
    assert (phase.cycles_overlapped, phase.cycles_serial) == step_by_hand(1000)


def test_a_decode_of_2048_tokens_by_hand(llama: SimulationReport) -> None:
    steps = [step_by_hand(context) for context in range(1, 2049)]
    overlapped, serial = (sum(step[i] for step in steps) for i in (0, 1))
    assert llama.cycles == overlapped
    assert llama.tokens_per_s == llama.tokens_per_s_overlapped == pytest.approx(2048 * 500e6 / overlapped)
    assert llama.tokens_per_s_serial == pytest.approx(2048 * 500e6 / serial)
    assert llama.first_token_s == steps[0][0] / 500e6


def test_first_principles_bound_the_decode(llama: SimulationReport) -> None:
    """Weights, FP16 head and FP16 KV cache at 1876 GB/s allow 465 tokens/s at a mean context of 1024."""
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) / 2
    head, kv = 2 * 32000 * 4096, 32 * 2 * 4096 * 2 * 1024
    bound = 2039e9 * 0.92 / (weights + head + kv)
    assert bound == pytest.approx(465, abs=1)
    assert llama.tokens_per_s is not None
    assert llama.tokens_per_s < bound
    # with FP16 multipliers to spare, only fill, outlier columns, scales and exposed clustering are left
    plenty = replace(PAPER, pe_line=replace(PAPER.pe_line, macs=4096), rates=replace(PAPER.rates, dequant_values=4096))
    shape = load_shape("llama-2-7b")
    fast = simulate(build(shape), shape, plenty).tokens_per_s
    assert fast is not None
    assert 0.93 * bound < fast < bound


def test_one_entry_a_linear_layer(llama: SimulationReport) -> None:
    names = [(layer.name, layer.M, layer.K, layer.N, layer.repeat, layer.passes) for layer in llama.operations]
    assert names == [
        ("blocks.*.q", 1, 4096, 4096, 32, 2048),
        ("blocks.*.k", 1, 4096, 4096, 32, 2048),
        ("blocks.*.v", 1, 4096, 4096, 32, 2048),
        ("blocks.*.o", 1, 4096, 4096, 32, 2048),
        ("blocks.*.gate", 1, 4096, 11008, 32, 2048),
        ("blocks.*.up", 1, 4096, 11008, 32, 2048),
        ("blocks.*.down", 1, 11008, 4096, 32, 2048),
    ]


def test_traffic_shares_of_figure_18a(llama: SimulationReport) -> None:
    """76.0 % weight indices and 19.1 % LUT (Fig. 18a prints 76.0 and 19.2), the site's clustering with its layer."""
    query = llama.operations[0]
    on_chip = {buffer: query.bytes[buffer] for buffer in BUFFERS}
    assert on_chip == {
        "weight_index_buffer": 4096 * 2048 + 42 * 2048,
        "lut": 4096 * 512 + 4096 * 4 * 2,
        "activation_index_buffer": 256 * 2048,
        "output_buffer": 3 * 8192,
    }
    total = sum(on_chip.values())
    assert round(100 * on_chip["weight_index_buffer"] / total, 1) == 76.0
    assert round(100 * on_chip["lut"] / total, 1) == 19.1


def test_only_the_first_layer_of_a_site_answers_for_its_clustering(llama: SimulationReport) -> None:
    query, key = llama.operations[:2]
    assert (query.quantize_cycles, key.quantize_cycles) == (128 + 1024, 0)
    assert query.bytes["lut"] - key.bytes["lut"] == 4096 * 4 * 2
    assert query.cycles == key.cycles


def test_the_sizes_of_another_chip_show(llama: SimulationReport) -> None:
    shape = load_shape("llama-2-7b")
    small = simulate(build(shape), shape, SMALL, decode=1).operations[0]
    # 1024 channels a line, ceil(4096/128) = 32 cycles to count, 256/16 = 16 to reduce; 4096/8 = 512 an outlier
    assert (small.main_cycles, small.outlier_cycles) == (1024 * 32, 12 + 1 + 42 * 512)
    assert small.bytes["activation_index_buffer"] == 1024 * 2048


def test_a_prompt_by_hand() -> None:
    """64 tokens, 2 blocks of the tiny model: what the phases must count."""
    report = simulate(build(TINY), TINY, PAPER, batch=2, prefill=64, decode=0)
    query = report.operations[0]
    assert (query.phase, query.M, query.passes) == ("prefill", 128, 1)
    assert query.main_cycles == 128 * 4 * 8
    assert report.tokens_per_s is report.tokens_per_s_serial is None
    assert report.first_token_s == report.seconds > 0
    # 64*65/2 pairs, both products of 4 heads of 16 channels, 2 sequences; the head for 2 last tokens: 640 a cycle
    pairs = 64 * 65 // 2
    dense = 2 * math.ceil(2 * 4 * 16 * 2 * pairs / 640) + math.ceil(2 * 64 * 100 / 640)
    assert report.phases[0].work["dense"] == dense
    # the cache: 2 sequences of 64 tokens, 2 blocks, keys and values of 2 heads of 16 channels, written and read once
    assert report.phases[0].hbm_bytes["kv_cache"] == 2 * (2 * 64 * 2 * 2 * 16 * 2) * 2


def test_prompt_and_decode_meet() -> None:
    """A decode after a prompt is the tail of the longer decode."""
    program = build(TINY)
    longer = simulate(program, TINY, PAPER, decode=48)
    head = simulate(program, TINY, PAPER, decode=32)
    tail = simulate(program, TINY, PAPER, prefill=32, decode=16)
    assert tail.phases[1].cycles == longer.cycles - head.cycles
    assert tail.cycles == sum(phase.cycles for phase in tail.phases)
    assert tail.first_token_s == tail.phases[0].seconds


def test_long_queries_read_the_cache_in_tiles() -> None:
    """Half of 64 KiB holds 128 queries and sums of one head pair of 16 channels: a 256-token prompt reads 128 + 256."""
    report = simulate(build(TINY), TINY, PAPER, prefill=256, decode=0)
    row = 2 * 2 * 16 * 2
    tile = 32768 // (2 * 2 * 16 * 2)
    reads = sum(min(end, 256) for end in range(tile, 256 + tile, tile))
    assert report.phases[0].hbm_bytes["kv_cache"] == 2 * row * (reads + 256)


def test_batches_share_weights_but_not_caches() -> None:
    shape = load_shape("llama-2-7b")
    one, four = (simulate(build(shape), shape, PAPER, batch=batch, decode=8).phases[0] for batch in (1, 4))
    assert four.tokens == 4 * one.tokens
    assert four.hbm_bytes["kv_cache"] == 4 * one.hbm_bytes["kv_cache"]
    assert four.hbm_bytes["weights"] < 2 * one.hbm_bytes["weights"]  # down_proj alone is streamed for every token
    assert four.work["main_branch"] == 4 * one.work["main_branch"]


def test_the_schedule_setting_picks_the_headline() -> None:
    serial = replace(PAPER, schedule=replace(PAPER.schedule, overlap=False))
    program = build(TINY)
    chosen, other = simulate(program, TINY, serial, decode=4), simulate(program, TINY, PAPER, decode=4)
    assert chosen.tokens_per_s == chosen.tokens_per_s_serial == other.tokens_per_s_serial
    assert other.tokens_per_s == other.tokens_per_s_overlapped == chosen.tokens_per_s_overlapped
    assert chosen.phases[0].stalls["vector"] > other.phases[0].stalls["vector"]


def test_a_scale_of_the_inliers_waits_for_the_search() -> None:
    """inlier_absmax: each site first builds the trees and pops everything."""
    plain = simulate(build(TINY), TINY, PAPER, decode=1)
    waiting = simulate(build(TINY, scale_kind="inlier_absmax"), TINY, PAPER, decode=1)
    searches = 3 * (6 + 2 * 7) + (8 + 2 * 9)  # one outlier a side; 64 channels have 6 levels, 176 have 8
    assert waiting.phases[0].cycles_serial - plain.phases[0].cycles_serial == TINY.blocks * searches


def test_blocks_of_different_kinds_are_kept_apart() -> None:
    program = [replace(op, act_bits=3) if op.act_bits and op.block == 1 else op for op in build(TINY)]
    layers = simulate(program, TINY, PAPER, decode=1).operations
    assert len(layers) == 14
    assert {layer.repeat for layer in layers} == {1}


def test_the_report_as_json(llama: SimulationReport) -> None:
    data = llama.to_json()
    assert set(data["operations"][0]) >= {
        *("name", "M", "K", "N", "cycles", "main_cycles", "outlier_cycles", "repeat", "bytes", "energy_pj")
    }
    totals = data["totals"]
    assert totals["cycles"] == llama.cycles
    assert totals["seconds"] == llama.cycles / 500e6
    assert totals["tokens_per_s"] == llama.tokens_per_s
    assert set(totals["energy_pj"]) == {*UNITS, "hbm", "idle"}
    assert totals["energy_core_pj"] + totals["energy_pj"]["hbm"] == pytest.approx(totals["energy_total_pj"])
    assert totals["energy_per_token_pj"] == pytest.approx(totals["energy_total_pj"] / 2048)
    assert simulate(build(TINY), TINY, PAPER, prefill=4, decode=0).to_json()["totals"]["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"batch": 0}, "batch = 0: must be at least 1"),
        ({"prefill": -1}, "prefill = -1"),
        ({"decode": -1}, "decode = -1"),
        ({"decode": 0}, "nothing to simulate"),
        ({"prefill": 1000, "decode": 1049}, "2049: tiny has 2048 positions"),
    ],
)
def test_impossible_numbers_are_refused(numbers: dict[str, int], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        simulate(build(TINY), TINY, PAPER, **numbers)


def test_an_operation_that_does_not_fit_is_named() -> None:
    program = [replace(op, act_bits=8) if op.act_bits else op for op in build(TINY)]
    with pytest.raises(InputError, match=r"blocks\.0\.q: target oasis-28nm: pe_line\.index_bits is 4"):
        simulate(program, TINY, PAPER, decode=1)


shapes = st.builds(
    lambda head, kv, group, inter, blocks, vocab: ModelShape(
        "any", head * kv * group, inter, blocks, kv * group, kv, head, vocab, max_positions=4096
    ),
    st.sampled_from([8, 20, 64]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(16, 6000),
    st.integers(1, 3),
    st.integers(1, 5000),
)
lengths = st.tuples(st.integers(1, 4), st.integers(0, 300), st.integers(1, 60))


@settings(deadline=None, max_examples=40)
@given(shape=shapes, length=lengths, target=st.sampled_from([PAPER, SMALL]))
def test_parts_add_up_to_totals(shape: ModelShape, length: tuple[int, int, int], target: Target) -> None:
    report = simulate(build(shape), shape, target, *length)
    for phase in report.phases:
        assert phase.cycles == sum(phase.work.values()) + sum(phase.stalls.values())
        assert phase.cycles_overlapped <= phase.cycles_serial
        kinds = [kind for kind in report.kinds if kind.phase == phase.name]
        assert phase.cycles_serial == sum(kind.cycles for kind in kinds)
        for buffer in (*BUFFERS, "hbm"):
            assert phase.bytes[buffer] == sum(kind.bytes.get(buffer, 0) for kind in kinds)
        assert phase.bytes["hbm"] == sum(phase.hbm_bytes.values())
        for unit in (*UNITS, "hbm"):
            assert phase.energy_pj[unit] == pytest.approx(sum(kind.energy_pj[unit] for kind in kinds))
        layers = [layer for layer in report.operations if layer.phase == phase.name]
        (gemms,) = (kind for kind in kinds if kind.opcode == "LUT_GEMM")
        assert gemms.cycles == sum(layer.cycles * layer.repeat * layer.passes for layer in layers)
        assert phase.work["main_branch"] == sum(layer.main_cycles * layer.repeat * layer.passes for layer in layers)


@settings(deadline=None, max_examples=40)
@given(shape=shapes, length=lengths, factor=st.floats(1, 3), lines=st.integers(0, 16))
def test_better_hardware_never_hurts(
    shape: ModelShape, length: tuple[int, int, int], factor: float, lines: int
) -> None:
    program = build(shape)
    better = replace(
        PAPER,
        hbm=replace(PAPER.hbm, bandwidth_gb_s=PAPER.hbm.bandwidth_gb_s * factor),
        pe_line=replace(PAPER.pe_line, count=PAPER.pe_line.count + lines),
    )
    assert simulate(program, shape, better, *length).cycles <= simulate(program, shape, PAPER, *length).cycles


def test_costs_are_counted_once_however_long_the_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 blocks and 2048 steps cost as many evaluations as one block and one step."""
    calls: list[Opcode] = []

    def counted(op: Operation, phase: Phase, target: Target) -> Cost:
        calls.append(op.opcode)
        return cost_operation(op, phase, target)

    monkeypatch.setattr("oasis_cli.simulator.timing.cost_operation", counted)
    shape = load_shape("llama-2-70b")
    report = simulate(build(shape), shape, PAPER)
    assert [layer.repeat for layer in report.operations] == [80] * 7
    many = len(calls)
    simulate(build(replace(shape, blocks=1)), shape, PAPER, decode=1)
    assert len(calls) == 2 * many
