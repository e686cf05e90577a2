import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasis_cli.numerics.codebook import Codebook, assign_indices, boundaries, grid_integers

CODEBOOK = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float16)  # boundaries -0.5, 0.25, 1.25


def test_boundaries_are_midpoints() -> None:
    assert boundaries(CODEBOOK).tolist() == [-0.5, 0.25, 1.25]


def test_boundaries_are_rounded_once() -> None:
    # 1 + 2**-24 needs 25 bits: half of it, 0.5 + 2**-25, rounds to 0.5 in float32, ties to even
    assert boundaries(torch.tensor([2.0**-24, 1.0], dtype=torch.float16)).tolist() == [0.5]


def test_a_value_on_a_boundary_goes_up_and_the_ends_saturate() -> None:
    x = torch.tensor([[-9.0, -0.5, -0.50001, 0.25, 0.2499, 1.25, 99.0]])
    assert assign_indices(x, torch.ones(1), CODEBOOK).tolist() == [[0, 1, 0, 2, 1, 3, 3]]


def test_boundaries_scale_with_the_token() -> None:
    x = torch.tensor([[1.0, 0.5], [1.0, 0.5]])
    assert assign_indices(x, torch.tensor([1.0, 4.0]), CODEBOOK).tolist() == [[2, 2], [2, 1]]


def test_boundary_products_are_rounded_to_float32() -> None:
    scale, middle = np.float32(0.1), np.float32(0.25)
    product = np.float32(scale * middle)
    below = np.nextafter(product, np.float32(0))
    x = torch.tensor([[float(product), float(below)]])
    assert assign_indices(x, torch.tensor([float(scale)]), CODEBOOK).tolist() == [[2, 1]]


def test_equal_centroids_leave_an_empty_cluster() -> None:
    codebook = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float16)
    assert assign_indices(torch.tensor([[0.4, 0.6, 1.0]]), torch.ones(1), codebook).tolist() == [[0, 1, 3]]


def test_a_descending_codebook_is_refused() -> None:
    with pytest.raises(ValueError, match="must ascend"):
        boundaries(torch.tensor([1.0, 0.0]))


@given(
    st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=16),
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
)
def test_nearest_centroid_by_brute_force(levels: list[float], values: list[float]) -> None:
    codebook = torch.tensor(sorted(levels), dtype=torch.float16)
    x = np.array(values, dtype=np.float32)
    index = assign_indices(torch.from_numpy(x)[None], torch.ones(1), codebook)[0].numpy()
    distance = np.abs(x[:, None].astype(np.float64) - codebook.double().numpy()[None, :])
    chosen = distance[np.arange(len(x)), index]
    # midpoints of float16 numbers may need one rounding to float32: nearest up to that
    np.testing.assert_allclose(chosen, distance.min(axis=1), atol=1e-6)


def test_grid_integers_are_exact_or_refused() -> None:
    codebook = Codebook(torch.tensor([-1.0, 0.25, 0.5], dtype=torch.float16), 0.25)
    assert codebook.integers.tolist() == [-4, 1, 2]
    with pytest.raises(ValueError, match="do not lie"):
        grid_integers(torch.tensor([0.3], dtype=torch.float16), 0.25)
    with pytest.raises(ValueError, match="do not lie"):
        grid_integers(torch.tensor([128.0], dtype=torch.float16), 1.0)
    with pytest.raises(ValueError, match="positive step"):
        grid_integers(torch.tensor([0.0], dtype=torch.float16), 0.0)
