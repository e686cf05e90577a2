"""One LUT-GEMM: §IV and §V-D of the paper by hand arithmetic, on its chip and on two others."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasis_cli.errors import InputError
from oasis_cli.hardware.target import Target, load_target
from oasis_cli.simulator.gemm import OutlierSearch, count_cycles, search_comparisons
from oasis_cli.simulator.timing import Gemm, time_gemm

PAPER = load_target("oasis-28nm")
# half the lines, twice the counters, a wide tree, half the MACs, a thinner memory at twice the clock
WIDE = replace(
    PAPER,
    name="wide",
    clock_mhz=1000.0,
    pe_line=replace(PAPER.pe_line, count=8, index_counters=64, mac_tree_inputs=64, macs=4),
    hbm=replace(PAPER.hbm, bandwidth_gb_s=900.0, efficiency=0.8),
)
# many slow lines: 4 counters of 8 inputs, a tree of 8, short passes
NARROW = replace(
    PAPER,
    name="narrow",
    pe_line=replace(
        PAPER.pe_line, count=64, concat_units=1000, index_counters=4, counter_inputs=8, mac_tree_inputs=8, macs=2
    ),
)
FAST_MEMORY = replace(PAPER, hbm=replace(PAPER.hbm, bandwidth_gb_s=1e9))
TARGETS = (PAPER, WIDE, NARROW)
SQUARE = Gemm(M=1, K=4096, N=4096)


def test_mac_tree_paces_a_4096_gemm() -> None:
    """§V-D3: 4096/16 channels a line, each max(ceil(4096/512), 256/32) = 8 cycles."""
    assert time_gemm(SQUARE, PAPER).main_cycles == 256 * 8


def test_the_same_gemm_on_other_chips() -> None:
    # 4096/8 channels a line, max(4096/1024, 256/64) = 4 cycles
    assert time_gemm(SQUARE, WIDE).main_cycles == 512 * 4
    # 4096/64 channels a line; 4 passes of ceil(1000/32) = 32 and one of ceil(96/32) = 3 cycles, tree 256/8 = 32
    assert time_gemm(SQUARE, NARROW).main_cycles == 64 * (4 * 32 + 3)


@pytest.mark.parametrize(
    ("K", "cycles"), [(1, 1), (16, 1), (512, 1), (513, 2), (576, 2), (4096, 8), (4097, 9), (11008, 22), (28672, 56)]
)
def test_counting_takes_512_indices_a_cycle(K: int, cycles: int) -> None:
    assert count_cycles(K, PAPER) == cycles


@pytest.mark.parametrize(
    ("gemm", "weight_bits", "act_bits", "cycles"),
    [
        (Gemm(1, 4096, 4096), 4, 3, 256 * 8),  # counting is the pace: A3 gains nothing here
        (Gemm(1, 2048, 4096), 4, 4, 256 * 8),  # the tree is the pace
        (Gemm(1, 2048, 4096), 4, 3, 256 * 4),  # and here A3 gains
        (Gemm(1, 11008, 4096), 4, 4, 256 * 22),
        (Gemm(1, 4096, 11008), 4, 4, 688 * 8),
        (Gemm(1, 576, 192), 4, 4, 12 * 8),
        (Gemm(3, 4096, 17), 4, 4, 3 * 2 * 8),
        (Gemm(7, 5, 1), 2, 2, 7),
    ],
)
def test_main_branch_by_hand(gemm: Gemm, weight_bits: int, act_bits: int, cycles: int) -> None:
    timing = time_gemm(gemm, PAPER, weight_bits=weight_bits, act_bits=act_bits)
    assert timing.main_cycles == cycles


def test_outlier_branch_is_a_third_shorter() -> None:
    """§V-D3: 12 levels, a pop, then 42 outliers of 4096/(16*8) = 32 cycles: 1357 of 2048."""
    timing = time_gemm(SQUARE, PAPER, outliers=21)
    assert timing.outlier_cycles == 12 + 1 + 42 * 32 == 1357
    assert 0.32 <= 1 - timing.outlier_cycles / timing.main_cycles <= 0.35
    assert timing.merge_cycles == 32
    assert timing.stalls["outlier_branch"] == 0


def test_outlier_branch_on_other_chips() -> None:
    # 8 lines of 4 MACs: 128 cycles an outlier
    assert time_gemm(SQUARE, WIDE, outliers=21).outlier_cycles == 12 + 1 + 42 * 128
    # 64 lines of 2 MACs: 32 cycles an outlier
    assert time_gemm(SQUARE, NARROW, outliers=21).outlier_cycles == 12 + 1 + 42 * 32


def test_a_narrow_gemm_waits_for_the_pops() -> None:
    """N = 1024 compensates in 8 cycles, a pop takes 1 + 12."""
    assert time_gemm(Gemm(1, 4096, 1024), PAPER, outliers=21).outlier_cycles == 12 + 1 + 42 * 13


def test_many_outliers_set_the_pace() -> None:
    """§V-D4: at 5 % a side the outlier branch is the bottleneck."""
    k = math.ceil(0.05 * 4096)
    timing = time_gemm(SQUARE, FAST_MEMORY, outliers=k)
    branch = 12 + 1 + 2 * k * 32
    assert timing.outlier_cycles == branch > 2 * timing.main_cycles
    assert timing.cycles == branch + 32  # the merge follows


def test_without_look_ahead_the_search_comes_first() -> None:
    """OASIS-C (§V-D4): 12 levels and 42 pops of 13 cycles before the GEMM."""
    conventional = replace(PAPER, schedule=replace(PAPER.schedule, look_ahead=False))
    timing = time_gemm(SQUARE, conventional, outliers=21)
    assert timing.stalls["outlier_branch"] == 12 + 42 * 13
    assert timing.cycles == time_gemm(SQUARE, PAPER, outliers=21).cycles + 558
    assert timing.outlier_cycles == 558 + 42 * 32


def test_a_long_token_passes_the_search_tree_in_segments() -> None:
    search = OutlierSearch.of(11008, 56, PAPER)
    assert search.start_cycles == 14 + 2  # ceil(log2 11008) levels, three segments of 4096 one behind the other
    assert (search.pop_cycles, search.pops) == (1 + 14, 112)


def test_comparisons_of_the_search() -> None:
    """§IV-D: 1.5 N for both trees (exactly N-1 and N/2-1), log2 N a pop; a sort-based engine needs 6 N."""
    assert search_comparisons(4096, 21) == 1.5 * 4096 - 2 + 42 * 12
    assert search_comparisons(256, 2) == 1.5 * 256 - 2 + 4 * 8
    assert search_comparisons(4096, 0) == 0
    assert search_comparisons(4096, 21) < 6 * 4096


def test_traffic_of_the_square_gemm() -> None:
    """Fig. 18(a), bytes read on chip, without the clustering of the input."""
    moved = time_gemm(SQUARE, PAPER, outliers=21).bytes
    assert moved["weight_index_buffer"] == 4096 * 2048 + 42 * 2048
    assert moved["lut"] == 4096 * 256 * 2
    assert moved["activation_index_buffer"] == 256 * 2048
    assert moved["output_buffer"] == 2 * 8192
    # the memory moves the weights and the outliers' columns once, a scale a channel, the LUT and two codebooks
    assert moved["hbm"] == 4096 * 2048 + 42 * 2048 + 4096 * 2 + 2 * (256 + 32)


def test_the_memory_sets_the_pace_at_its_stream_rate() -> None:
    """8.48 MB at 2039 GB/s x 0.92 and 500 MHz, then concat 1, count 8, tree 8, latency 6, merge 1 for the last."""
    timing = time_gemm(SQUARE, PAPER, outliers=21)
    moved = Fraction(4096 * 2048 + 42 * 2048 + 4096 * 2 + 576)
    stream = moved / (Fraction(2039 * 10**9) * Fraction(92, 100) / (500 * 10**6))
    assert timing.hbm_cycles == math.ceil(stream) == 2262
    assert timing.cycles == math.ceil(stream + 1 + 8 + 8 + 6 + 1)
    assert timing.stalls["hbm"] == math.floor(stream) - 2048


def test_an_endless_memory_leaves_only_the_fill() -> None:
    timing = time_gemm(SQUARE, FAST_MEMORY, outliers=21)
    # concat 1, the shorter of count and tree 8, tree latency 6, merge 1, and the first load
    assert timing.cycles == 2048 + 1 + 8 + 6 + 1 + 1
    assert timing.stalls["hbm"] == 0


def test_outlier_columns_can_be_left_out() -> None:
    free = replace(PAPER, schedule=replace(PAPER.schedule, outlier_columns_from_hbm=False))
    assert time_gemm(SQUARE, free, outliers=21).hbm_bytes["outlier_columns"] == 0
    assert time_gemm(SQUARE, PAPER, outliers=21).hbm_bytes["outlier_columns"] == 42 * 2048


def test_eight_tokens_share_the_weights_of_a_resident_channel() -> None:
    """16 KB of activation indices hold 8 tokens of K = 4096; one channel fits in 2 KB."""
    matrix = 4096 * 2048
    assert time_gemm(Gemm(8, 4096, 4096), PAPER).hbm_bytes["weights"] == matrix
    assert time_gemm(Gemm(9, 4096, 4096), PAPER).hbm_bytes["weights"] == 2 * matrix
    assert time_gemm(Gemm(128, 4096, 4096), PAPER).hbm_bytes["weights"] == 16 * matrix


def test_a_channel_beyond_the_weight_buffer_is_streamed_for_every_token() -> None:
    matrix = 4096 * 11008 // 2
    assert time_gemm(Gemm(3, 11008, 4096), PAPER).hbm_bytes["weights"] == 3 * matrix
    line = replace(PAPER.pe_line, weight_index_buffer_bytes=8192)
    assert time_gemm(Gemm(2, 11008, 4096), replace(PAPER, pe_line=line)).hbm_bytes["weights"] == matrix


def test_a_prompt_is_bound_by_computing() -> None:
    timing = time_gemm(Gemm(128, 4096, 4096), PAPER, outliers=21)
    assert timing.stalls["hbm"] == 0
    assert timing.main_cycles == 128 * 2048
    assert timing.cycles - timing.main_cycles < 40


def test_activations_that_overflow_the_output_buffer_go_to_memory() -> None:
    """16 tokens in and out are 2 * 16 * 8 KiB; 64 KiB stay, but no more than the outputs can leave."""
    assert time_gemm(Gemm(4, 4096, 4096), PAPER).hbm_bytes["activations"] == 0
    assert time_gemm(Gemm(5, 4096, 4096), PAPER).hbm_bytes["activations"] == 2 * 5 * 8192 - 65536
    assert time_gemm(Gemm(16, 4096, 4096), PAPER).hbm_bytes["activations"] == 16 * 8192


def test_indices_wider_than_the_concat_unit_are_refused() -> None:
    with pytest.raises(InputError, match=r"pe_line\.index_bits is 4, the program has W8A4"):
        time_gemm(SQUARE, PAPER, weight_bits=8)


def test_a_token_beyond_the_activation_buffer_is_refused() -> None:
    with pytest.raises(InputError, match=r"chip\.activation_index_buffer_bytes is 16384.*K = 36864 needs 18432"):
        time_gemm(Gemm(1, 36864, 9216), PAPER)


def test_callers_mistakes() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Gemm(1, 0, 4)
    with pytest.raises(ValueError, match="do not fit K = 4"):
        time_gemm(Gemm(1, 4, 4), PAPER, outliers=3)


gemms = st.builds(Gemm, M=st.integers(1, 40), K=st.integers(1, 30000), N=st.integers(1, 30000))
targets = st.sampled_from(TARGETS)
bits = st.integers(1, 4)


@given(gemm=gemms, target=targets, weight_bits=bits, act_bits=bits, share=st.floats(0, 0.1))
def test_cycles_are_work_and_stalls(gemm: Gemm, target: Target, weight_bits: int, act_bits: int, share: float) -> None:
    outliers = min(gemm.K // 2, math.ceil(share * gemm.K))
    timing = time_gemm(gemm, target, weight_bits=weight_bits, act_bits=act_bits, outliers=outliers)
    assert timing.cycles == timing.main_cycles + sum(timing.stalls.values())
    assert timing.cycles >= max(timing.main_cycles, timing.outlier_cycles, timing.hbm_cycles)
    assert min(timing.stalls.values()) >= 0
    assert timing.bytes["hbm"] == sum(timing.hbm_bytes.values())
    assert max(timing.busy[unit] for unit in ("index_counter", "mac_tree", "mac", "orizuru")) <= timing.cycles


@given(gemm=gemms, target=targets, factor=st.floats(1, 4), outliers=st.integers(0, 100))
def test_a_faster_memory_never_hurts(gemm: Gemm, target: Target, factor: float, outliers: int) -> None:
    outliers = min(outliers, gemm.K // 2)
    faster = replace(target, hbm=replace(target.hbm, bandwidth_gb_s=target.hbm.bandwidth_gb_s * factor))
    assert time_gemm(gemm, faster, outliers=outliers).cycles <= time_gemm(gemm, target, outliers=outliers).cycles


@given(gemm=gemms, target=targets, more=st.integers(0, 20), outliers=st.integers(0, 100))
def test_more_lines_never_hurt(gemm: Gemm, target: Target, more: int, outliers: int) -> None:
    outliers = min(outliers, gemm.K // 2)
    larger = replace(target, pe_line=replace(target.pe_line, count=target.pe_line.count + more))
    assert time_gemm(gemm, larger, outliers=outliers).cycles <= time_gemm(gemm, target, outliers=outliers).cycles
