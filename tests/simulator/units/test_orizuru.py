"""Do the two trees pop what a sort finds, ties to the lower channel, at the comparisons that §IV-D counts?"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oasis_cli.simulator.units.orizuru import count_comparisons, search_outliers, sort_outliers
from oasis_cli.simulator.units.outlier_set import beyond_thresholds, from_mask


def by_hand(token: list[float], k: int) -> tuple[list[int], list[int]]:
    channels = range(len(token))
    largest = sorted(channels, key=lambda channel: (-token[channel], channel))
    smallest = sorted(channels, key=lambda channel: (token[channel], channel))
    return largest[:k], smallest[:k]


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    """A few tokens, most with many ties, and a k that fits."""
    K = draw(st.integers(1, 41))
    few = st.sampled_from([-2.0, -0.0, 0.0, 0.5, 2.0])
    value = draw(st.sampled_from([few, st.floats(width=16, allow_nan=False, allow_infinity=False)]))
    tokens = draw(st.lists(st.lists(value, min_size=K, max_size=K), min_size=1, max_size=4))
    return tokens, draw(st.integers(0, K // 2))


@settings(deadline=None)
@given(windows())
def test_trees_and_sort_pop_in_the_order_of_brute_force(window: tuple[list[list[float]], int]) -> None:
    tokens, k = window
    expected = [by_hand(token, k) for token in tokens]
    for search in (search_outliers, sort_outliers):
        pops = search(torch.tensor(tokens), k)
        assert [(a, b) for a, b in zip(pops.largest.tolist(), pops.smallest.tolist(), strict=True)] == expected


@settings(deadline=None)
@given(windows())
def test_no_channel_is_an_outlier_twice(window: tuple[list[list[float]], int]) -> None:
    tokens, k = window
    outliers = search_outliers(torch.tensor(tokens), k).outliers()
    for token, channels, valid in zip(tokens, outliers.channels.tolist(), outliers.valid.tolist(), strict=True):
        taken = [channel for channel, good in zip(channels, valid, strict=True) if good]
        largest, smallest = by_hand(token, k)
        assert sorted(taken) == sorted({*largest, *smallest})


def test_the_example_of_figure_10() -> None:
    """Eight inputs: 9 at leaf 14 is popped first; its neighbour follows within three pops."""
    token = torch.tensor([[3.0, 1.0, 7.0, 2.0, 5.0, 4.0, 9.0, 8.0]])
    pops = search_outliers(token, 3)
    assert pops.largest.tolist() == [[6, 7, 2]]
    assert pops.smallest.tolist() == [[1, 3, 0]]


def test_a_constant_token_pops_the_lowest_channels_from_both_trees() -> None:
    pops = search_outliers(torch.full((1, 6), 0.25), 3)
    assert pops.largest.tolist() == pops.smallest.tolist() == [[0, 1, 2]]
    assert pops.outliers().mask(6).tolist() == [[True, True, True, False, False, False]]
    assert int(pops.outliers().valid.sum()) == 3


def test_half_of_all_channels_from_each_side() -> None:
    pops = search_outliers(torch.tensor([[4.0, 1.0, 3.0, 2.0]]), 2)
    assert pops.outliers().mask(4).all()


def test_a_tie_in_the_first_level_goes_left_in_both_trees() -> None:
    """The reversed bit of the max tree would send the min tree right: channel 1 instead of 0."""
    pops = search_outliers(torch.tensor([[1.0, 1.0, 1.0, 1.0]]), 1)
    assert (pops.largest.tolist(), pops.smallest.tolist()) == ([[0]], [[0]])


def test_padding_is_never_popped() -> None:
    """Neither the zeros that pad a negative token nor those that pad a positive one."""
    for sign in (-1.0, 1.0):
        pops = search_outliers(sign * torch.arange(1.0, 6.0)[None], 2)
        assert max(pops.largest.max(), pops.smallest.max()) < 5


def test_single_channel_has_no_outliers() -> None:
    pops = search_outliers(torch.tensor([[7.0], [0.0]]), 0)
    assert pops.outliers().mask(1).tolist() == [[False], [False]]


@pytest.mark.parametrize(("K", "k"), [(8, 3), (4096, 21), (64, 0), (2, 1)])
def test_comparisons_of_section_4d(K: int, k: int) -> None:
    """1.5 K - 2 to build both trees, log2 K for each of the 2k pops."""
    levels = K.bit_length() - 1
    expected = {"build": 3 * K // 2 - 2, "upkeep": 2 * k * levels} if k else {"build": 0, "upkeep": 0}
    assert search_outliers(torch.randn(2, K), k).comparisons == expected
    assert sort_outliers(torch.randn(2, K), k).comparisons == expected


def test_comparisons_of_a_padded_token_are_those_of_the_padded_tree() -> None:
    assert (
        count_comparisons(576, 3) == count_comparisons(1024, 3) == search_outliers(torch.randn(1, 576), 3).comparisons
    )


@pytest.mark.parametrize("k", [-1, 3])
def test_k_must_fit(k: int) -> None:
    for search in (search_outliers, sort_outliers):
        with pytest.raises(ValueError, match="do not fit"):
            search(torch.zeros(1, 5), k)


def test_static_thresholds_mark_what_lies_outside() -> None:
    token = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 1.5], [0.0, 0.0, 0.0, 0.0, 9.0]])
    outliers = beyond_thresholds(token, torch.tensor([-1.0, 1.0]))
    assert outliers.channels.tolist()[0] == [0, 4]
    assert outliers.mask(5).tolist() == [[True, False, False, False, True], [False, False, False, False, True]]


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4))
def test_marks_survive_as_channels(marks: list[list[bool]]) -> None:
    mask: Tensor = torch.tensor(marks)
    assert torch.equal(from_mask(mask).mask(7), mask)
