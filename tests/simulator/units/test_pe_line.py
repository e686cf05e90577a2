"""Do counted indices weigh the LUT into the product of the dequantized matrices, whatever the engine?"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oasis_cli.simulator.units import index_counter, pe_line
from oasis_cli.simulator.units.index_counter import count_indices
from oasis_cli.simulator.units.mac_tree import weighted_sum
from oasis_cli.simulator.units.pe_line import counted_gemm, gathered_gemm, half_precision_gemm

Gemm = Callable[[Tensor, Tensor, Tensor], Tensor]
both = pytest.mark.parametrize("gemm", [counted_gemm, gathered_gemm])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    act_bits, weight_bits = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    M, N, K = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 33))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    act = torch.randint(0, 2**act_bits, (M, K), generator=generator, dtype=torch.uint8)
    weight = torch.randint(0, 2**weight_bits, (N, K), generator=generator, dtype=torch.uint8)
    return act, weight, 2**act_bits, 2**weight_bits


def test_the_example_of_figure_6() -> None:
    """M, K, N = 1, 6, 1 of one-bit indices, counted by hand: 01 10 11 01 00 11."""
    act, weight = torch.tensor([[0, 1, 1, 0, 0, 1]]).byte(), torch.tensor([[1, 0, 1, 1, 0, 1]]).byte()
    counts = count_indices(act, weight, 2, 2)
    assert counts.reshape(4).tolist() == [1, 2, 1, 2]  # of 00, 01, 10, 11
    # centroids 2, 5 and 3, 7: LUT 6, 14, 15, 35
    lut = torch.tensor([[6, 14], [15, 35]], dtype=torch.int16)
    assert weighted_sum(counts, lut).item() == 1 * 6 + 2 * 14 + 1 * 15 + 2 * 35
    assert counted_gemm(act, weight, lut).item() == gathered_gemm(act, weight, lut).item() == 119


@settings(deadline=None)
@given(problems())
def test_counts_are_a_histogram_of_the_concatenated_indices(problem: tuple[Tensor, Tensor, int, int]) -> None:
    act, weight, act_levels, weight_levels = problem
    counts = count_indices(*problem)
    assert bool((counts.sum((2, 3)) == act.shape[1]).all())
    for m, token in enumerate(act.tolist()):
        for n, channel in enumerate(weight.tolist()):
            histogram = Counter(i * weight_levels + j for i, j in zip(token, channel, strict=True))
            expected = [histogram[index] for index in range(act_levels * weight_levels)]
            assert counts[m, n].flatten().tolist() == expected


@settings(deadline=None)
@given(problems())
def test_both_engines_give_the_product_of_the_dequantized_matrices(problem: tuple[Tensor, Tensor, int, int]) -> None:
    act, weight, act_levels, weight_levels = problem
    centroids_a, centroids_w = torch.arange(act_levels) * 16 - 100, torch.arange(weight_levels) * 15 - 127
    product = centroids_a.double()[act.long()] @ centroids_w.double()[weight.long()].T
    lut = (centroids_a[:, None] * centroids_w).to(torch.int16)
    assert torch.equal(counted_gemm(act, weight, lut), product)
    assert torch.equal(gathered_gemm(act, weight, lut), product)


@settings(deadline=None)
@given(problems())
def test_both_engines_agree_on_a_float16_lut(problem: tuple[Tensor, Tensor, int, int]) -> None:
    act, weight, act_levels, weight_levels = problem
    lut = torch.linspace(-3, 2, act_levels * weight_levels).view(act_levels, weight_levels).half()
    expected = lut.double()[act.long()[:, None, :], weight.long()[None]].sum(2)
    assert torch.equal(counted_gemm(act, weight, lut), expected)
    assert torch.equal(gathered_gemm(act, weight, lut), expected)


@both
def test_long_sums_stay_exact(gemm: Gemm) -> None:
    """16129 * 2053 = 33,112,837 is odd and beyond 2**24: a float32 sum would lose it."""
    lut = torch.full((2, 2), 127 * 127, dtype=torch.int16)
    ones = torch.ones(1, 2053, dtype=torch.uint8)
    assert gemm(ones, ones, lut).item() == 33_112_837


@both
def test_blocks_make_no_difference(gemm: Gemm, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    act = torch.randint(0, 8, (5, 21), generator=generator, dtype=torch.uint8)
    weight = torch.randint(0, 16, (7, 21), generator=generator, dtype=torch.uint8)
    lut = torch.randint(-99, 99, (8, 16), generator=generator, dtype=torch.int16)
    whole = gemm(act, weight, lut)
    monkeypatch.setattr(pe_line, "_COUNTS_AT_ONCE", 8 * 16 * 6)
    monkeypatch.setattr(pe_line, "_ENTRIES_AT_ONCE", 8 * 7 * 4)
    assert torch.equal(gemm(act, weight, lut), whole)


def test_too_many_channels_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_counter, "_EXACT", 4)
    with pytest.raises(ValueError, match="K = 5"):
        count_indices(torch.zeros(1, 5).byte(), torch.zeros(1, 5).byte(), 2, 2)


def test_half_precision_tree_rounds_at_every_step() -> None:
    """Four counts of a LUT of 1, 2**-11, 2**-11, 2**-11 (times 1): by hand through a tree of two and of four inputs.

    Two inputs: (1 + 2**-11) rounds to 1 (ties to even); 2**-11 + 2**-11 = 2**-10; 1 + 2**-10 is a float16.
    One input a cycle: 1 + 2**-11 = 1, three times.
    """
    act, weight = torch.tensor([[0, 0, 1, 1]]).byte(), torch.tensor([[0, 1, 0, 1]]).byte()
    entries = torch.tensor([[1.0, 2.0**-11], [2.0**-11, 2.0**-11]]).half()
    assert half_precision_gemm(act, weight, entries, 2).item() == 1 + 2.0**-10
    assert half_precision_gemm(act, weight, entries, 4).item() == 1 + 2.0**-10
    assert half_precision_gemm(act, weight, entries, 1).item() == 1
    assert half_precision_gemm(act, weight, entries, 32).item() == 1 + 2.0**-10


@settings(deadline=None)
@given(problems())
def test_half_precision_is_exact_on_small_integers(problem: tuple[Tensor, Tensor, int, int]) -> None:
    act, weight, act_levels, weight_levels = problem
    lut = (torch.arange(act_levels * weight_levels) % 32).view(act_levels, weight_levels)
    exact = counted_gemm(act, weight, lut.to(torch.int16))
    assert torch.equal(half_precision_gemm(act, weight, lut.half(), 32), exact)
