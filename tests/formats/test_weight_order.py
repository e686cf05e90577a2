"""Does every line get the channels that it takes, in order, in one range?"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_cli.formats.weight_order import channel_order, stream_order


def test_ten_channels_over_four_lines() -> None:
    """Line 0: 0 4 8, line 1: 1 5 9, line 2: 2 6, line 3: 3 7."""
    assert stream_order(10, 4).tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 3, 7]


def test_fewer_channels_than_lines() -> None:
    assert stream_order(3, 16).tolist() == [0, 1, 2]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 40))
def test_orders_are_inverse_and_lines_start_where_the_page_says(N: int, lines: int) -> None:
    order = stream_order(N, lines)
    assert order[channel_order(N, lines)].tolist() == list(range(N))
    for line in range(min(lines, N)):
        start = line * (N // lines) + min(line, N % lines)
        channels = np.arange(line, N, lines)
        assert order[start : start + len(channels)].tolist() == channels.tolist()


@pytest.mark.parametrize(("N", "lines"), [(0, 1), (1, 0)])
def test_both_numbers_are_positive(N: int, lines: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        stream_order(N, lines)
