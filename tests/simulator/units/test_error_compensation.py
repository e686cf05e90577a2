"""Are the outliers' errors what the paper computes, and is each one compensated once?"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_cli.simulator.units.error_compensation import compensate, residuals
from oasis_cli.simulator.units.orizuru import search_outliers
from oasis_cli.simulator.units.outlier_set import OutlierSet, from_mask


def test_the_residuals_of_section_3c() -> None:
    """5.07 is quantized to 0.78 and -3.01 to 0.13: residuals 4.29 and -3.14."""
    x = torch.tensor([[0.5, 5.07, 0.5, -3.01, 0.5, 0.5]])
    codebook = torch.tensor([0.13, 0.78]).half()
    outliers = from_mask(torch.tensor([[False, True, False, True, False, False]]))
    index = torch.tensor([[0, 1, 1, 0, 0, 1]]).byte()
    found = residuals(x, torch.ones(1), index, codebook, outliers)
    assert torch.allclose(found, torch.tensor([[4.29, -3.14]]), atol=5e-4)  # the codebook is in half precision


def test_a_channel_popped_twice_is_compensated_once() -> None:
    """A constant token: channels 0 and 1 from both trees, residual 3 - 1 each, weights 0.5 and 2."""
    x = torch.full((1, 4), 3.0)
    outliers = search_outliers(x, 2).outliers()
    codebook = torch.tensor([-1.0, 1.0]).half()
    r = residuals(x, torch.ones(1), torch.ones(1, 4).byte(), codebook, outliers)
    weight_index = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]).byte()
    y = compensate(r, outliers, weight_index, torch.tensor([0.5, 2.0]).half())
    assert y.tolist() == [[2 * 0.5 + 2 * 2.0, 2 * 2.0 + 2 * 2.0]]


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(1, 5), st.integers(1, 30), st.integers(1, 6))
def test_compensation_is_the_sparse_product_rounded_once(seed: int, M: int, K: int, N: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((M, K)) < 0.3
    dense = np.where(mask, rng.standard_normal((M, K)).astype(np.float32), np.float32(0))
    index, codebook = rng.integers(0, 16, (N, K)).astype(np.uint8), np.sort(rng.standard_normal(16)).astype(np.float16)
    outliers = from_mask(torch.from_numpy(mask))
    r = torch.from_numpy(dense).gather(1, outliers.channels)
    found = compensate(r, outliers, torch.from_numpy(index), torch.from_numpy(codebook))
    expected = dense.astype(np.float64) @ codebook.astype(np.float64)[index].T
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-12)


def test_no_outliers_compensate_nothing() -> None:
    nothing = OutlierSet(torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0, dtype=torch.bool))
    y = compensate(torch.empty(2, 0), nothing, torch.zeros(3, 4).byte(), torch.zeros(2).half())
    assert y.tolist() == [[0.0] * 3] * 2
