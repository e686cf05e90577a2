import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oasis_cli.numerics.scale import SCALE_KINDS, token_scale

TOKENS = arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 40)), elements=st.floats(-1e4, 1e4, width=32))


def test_each_kind_by_hand() -> None:
    x = torch.tensor([[3.0, -4.0, 0.0, 12.0]])
    assert token_scale(x, "absmax").item() == 12.0
    assert token_scale(x, "rms").item() == 6.5  # sqrt((9 + 16 + 144) / 4) = sqrt(42.25)
    assert token_scale(x, "mean_abs").item() == 4.75
    # the largest (12) and the smallest (-4) are outliers, 3 is what is left
    assert token_scale(x, "inlier_absmax", outliers_a_side=1).item() == 3.0


@pytest.mark.parametrize("kind", SCALE_KINDS)
def test_zero_token_has_scale_zero_and_no_token_gives_no_scale(kind: str) -> None:
    assert token_scale(torch.zeros(2, 5), kind).tolist() == [0.0, 0.0]  # type: ignore[arg-type]
    assert token_scale(torch.zeros(0, 5), kind).shape == (0,)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SCALE_KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_gives_nan(kind: str, bad: float) -> None:
    scale = token_scale(torch.tensor([[1.0, bad, 2.0], [1.0, 1.0, 1.0]]), kind)  # type: ignore[arg-type]
    assert math.isnan(scale[0])
    assert scale[1] == 1.0


@given(TOKENS)
def test_sums_are_those_of_float64_rounded_once(x: np.ndarray) -> None:
    wide = x.astype(np.float64)
    expected_rms = np.sqrt((wide**2).mean(axis=1)).astype(np.float32)
    expected_mean = np.abs(wide).mean(axis=1).astype(np.float32)
    np.testing.assert_allclose(token_scale(torch.from_numpy(x), "rms").numpy(), expected_rms, rtol=2e-7)
    np.testing.assert_allclose(token_scale(torch.from_numpy(x), "mean_abs").numpy(), expected_mean, rtol=2e-7)


def test_half_precision_is_widened_first() -> None:
    x = torch.full((1, 4), 40000.0, dtype=torch.float16)  # its square overflows float16
    assert token_scale(x, "rms").item() == 40000.0


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown scale kind 'max'"):
        token_scale(torch.zeros(1, 2), "max")  # type: ignore[arg-type]
