"""Does the search tree find the number of boundaries that a value has passed?"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_cli.simulator.units.clustering import cluster

half = st.floats(width=16, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(
    bits=st.integers(1, 4),
    scale=st.floats(0, 100, width=32),
    data=st.data(),
)
def test_tree_counts_the_boundaries_passed(bits: int, scale: float, data: st.DataObject) -> None:
    bounds = sorted(data.draw(st.lists(half, min_size=2**bits - 1, max_size=2**bits - 1)))
    products = np.float32(scale) * np.array(bounds, np.float32)
    # values on a boundary, beside it, and anywhere
    values = [*products.tolist(), *np.nextafter(products, np.float32(-1e9)).tolist(), *data.draw(st.lists(half))]
    found = cluster(torch.tensor([values]), torch.tensor([scale]), torch.tensor(bounds))
    expected = [int(sum(float(product) <= float(np.float32(value)) for product in products)) for value in values]
    assert found.tolist() == [expected]
    assert found.dtype == torch.uint8


def test_ends_saturate_and_ties_go_up() -> None:
    """Centroids -1, 0, 0.5, 1 at scale 2: boundaries -1, 0.5, 1.5."""
    x = torch.tensor([[-9.0, -1.0, 0.4, 0.5, 1.5, 99.0]])
    assert cluster(x, torch.tensor([2.0]), torch.tensor([-0.5, 0.25, 0.75])).tolist() == [[0, 1, 1, 2, 3, 3]]


def test_repeated_centroids_are_passed_together() -> None:
    bounds = torch.tensor([0.0, 0.0, 1.0])
    assert cluster(torch.tensor([[-0.1, 0.0, 0.9]]), torch.tensor([1.0]), bounds).tolist() == [[0, 2, 2]]


def test_a_search_tree_is_complete() -> None:
    with pytest.raises(ValueError, match="got 2"):
        cluster(torch.zeros(1, 1), torch.ones(1), torch.tensor([0.0, 1.0]))
