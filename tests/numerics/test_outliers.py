import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oasis_cli.numerics.outlier_count import outlier_count
from oasis_cli.numerics.outliers import beyond_thresholds, find_outliers


def brute_force(token: list[float], k: int) -> set[int]:
    """Pop the extreme k times from each tree, the leftmost of equals first, each tree with a mask of its own."""
    popped: set[int] = set()
    for sign in (1, -1):
        left = list(range(len(token)))
        for _ in range(k):
            best = max(left, key=lambda i: (sign * token[i], -i))
            left.remove(best)
            popped.add(best)
    return popped


@pytest.mark.parametrize(
    ("K", "fraction", "expected"),
    [
        (4096, 0.005, 21),  # 20.48
        (576, 0.005, 3),  # 2.88
        (100, 0.07, 7),  # 7 exactly in decimal; 7.000000000000001 in binary floating point
        (1000, 0.001, 1),
        (7, 0.5, 3),  # at most K // 2
        (1, 0.005, 0),
        (4096, 0.0, 0),
    ],
)
def test_count_is_taken_in_decimal(K: int, fraction: float, expected: int) -> None:
    assert outlier_count(K, fraction) == expected


@given(st.integers(1, 50_000), st.decimals(0, "0.5", places=4))
def test_count_is_the_exact_ceiling(K: int, fraction: object) -> None:
    exact = math.ceil(Fraction(str(fraction)) * K)
    assert outlier_count(K, float(str(fraction))) == min(exact, K // 2)


@pytest.mark.parametrize("fraction", [-0.1, 0.6, math.nan])
def test_impossible_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="outlier fraction"):
        outlier_count(100, fraction)


def test_ties_go_to_the_lower_channel_in_both_trees() -> None:
    x = torch.tensor([[5.0, 1.0, 5.0, 1.0, 5.0, 3.0]])
    assert find_outliers(x, 1).nonzero()[:, 1].tolist() == [0, 1]
    assert find_outliers(x, 2).nonzero()[:, 1].tolist() == [0, 1, 2, 3]


def test_a_constant_token_is_compensated_once_a_channel() -> None:
    # both trees pop channels 0 and 1: two channels in all, none of them twice
    assert find_outliers(torch.full((1, 8), 2.5), 2).nonzero()[:, 1].tolist() == [0, 1]


def test_positive_and_negative_zero_are_equal() -> None:
    assert find_outliers(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 1).nonzero()[:, 1].tolist() == [0]


@given(st.data())
def test_agrees_with_popping_by_brute_force(data: st.DataObject) -> None:
    K = data.draw(st.integers(1, 24))
    k = data.draw(st.integers(0, K // 2))
    # few distinct values, so that ties abound
    x = data.draw(arrays(np.float32, (3, K), elements=st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 7.0])))
    found = find_outliers(torch.from_numpy(x), k)
    for row in range(3):
        assert set(found[row].nonzero()[:, 0].tolist()) == brute_force(x[row].tolist(), k)


def test_none_of_none() -> None:
    assert find_outliers(torch.zeros(0, 6), 2).shape == (0, 6)
    assert not find_outliers(torch.randn(3, 6), 0).any()


def test_more_than_half_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit K = 3"):
        find_outliers(torch.zeros(1, 3), 2)


def test_static_thresholds_take_only_what_lies_beyond() -> None:
    x = torch.tensor([[-3.0, -2.0, 0.0, 1.0, 1.5]])
    assert beyond_thresholds(x, torch.tensor([-2.0, 1.0])).tolist() == [[True, False, False, False, True]]
