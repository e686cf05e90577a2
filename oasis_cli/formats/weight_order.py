"""The order in which the PE lines stream the weight indices.

Line l of L takes the output channels l, l + L, l + 2L, … one after the other. An image stores line 0's channels first,
then line 1's, and so on, without padding: each line reads one contiguous range.
"""

import numpy as np
import numpy.typing as npt


def stream_order(N: int, lines: int) -> npt.NDArray[np.int64]:
    """Which output channel lies in which row of an indices section.

    Args:
        N: output channels.
        lines: PE lines L.

    Returns:
        int64 [N]: row r of the section holds channel `stream_order(N, L)[r]`. Line l starts at row
        l * (N // L) + min(l, N % L).

    Raises:
        ValueError: if a number is not positive.
    """
    if N < 1 or lines < 1:
        raise ValueError(f"N = {N} channels over {lines} lines: both must be positive")
    return np.concatenate([np.arange(line, N, lines) for line in range(min(lines, N))])


def channel_order(N: int, lines: int) -> npt.NDArray[np.int64]:
    """The inverse: output channel n lies in row `channel_order(N, L)[n]` of an indices section."""
    return np.argsort(stream_order(N, lines))
