import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oasis_cli.formats.packing import pack_indices, unpack_indices


def test_low_nibble_comes_first() -> None:
    assert pack_indices(torch.tensor([[1, 2, 3]], dtype=torch.uint8)).tolist() == [[0x21, 0x03]]


@given(arrays("uint8", st.tuples(st.integers(0, 5), st.integers(1, 33)), elements=st.integers(0, 15)))
def test_packing_loses_nothing(index: object) -> None:
    tensor = torch.from_numpy(index)
    assert torch.equal(unpack_indices(pack_indices(tensor), tensor.shape[1]), tensor)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="16 does not fit"):
        pack_indices(torch.tensor([[16]], dtype=torch.uint8))
    with pytest.raises(ValueError, match="2 bytes a channel do not hold K = 5"):
        unpack_indices(torch.zeros(1, 2, dtype=torch.uint8), 5)
