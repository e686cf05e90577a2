import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oasis_cli.numerics.uniform import in_groups, round_to_integers, round_to_mxfp4, round_to_nvfp4

GOLDEN = Path(__file__).parents[1] / "golden" / "torchao_fp4.json"


def test_integers_by_hand() -> None:
    """absmax 7 gives s = 1 at 4 bits; 2.5 goes to the even 2, -7 stays, and a clipped range saturates."""
    x = torch.tensor([[7.0, 2.5, -7.0, 0.4]])
    assert round_to_integers(x, 4).tolist() == [[7.0, 2.0, -7.0, 0.0]]
    clipped = round_to_integers(x, 4, clip=0.5)  # s = 0.5: 7 is beyond 7 * 0.5, -7 beyond -8 * 0.5
    assert clipped.tolist() == [[3.5, 2.5, -4.0, 0.5]]


def test_groups_have_their_own_scales() -> None:
    """K = 5 in groups of 2: the last group holds one value."""
    x = torch.tensor([[7.0, 1.2, 70.0, 12.0, 0.7]])
    assert in_groups(x, 2).shape == (1, 3, 2)
    torch.testing.assert_close(round_to_integers(x, 4, group=2), torch.tensor([[7.0, 1.0, 70.0, 10.0, 0.7]]))


def test_mxfp4_by_hand() -> None:
    """absmax 12: 2^floor(log2 12) = 8, less the format's 4, so s = 2. Ties: 0.5 / 2 = 0.25 goes to 0, 1.5 / 2 to 1."""
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([12.0, 0.5, 1.5, -5.0, 7.0, 15.0])
    assert round_to_mxfp4(x)[0, :6].tolist() == [12.0, 0.0, 2.0, -4.0, 8.0, 12.0]


def test_nvfp4_by_hand() -> None:
    """largest 6 * 448 makes the outer scale 1; a block with absmax 12 has the scale 2."""
    x = torch.zeros(1, 32)
    x[0, :3], x[0, 16] = torch.tensor([12.0, 5.0, -0.4]), 6 * 448.0
    assert round_to_nvfp4(x)[0, [0, 1, 2, 16]].tolist() == [12.0, 4.0, -0.0, 6 * 448.0]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_block_floats_are_torchaos(name: str) -> None:
    """To the bit, on what torchao gave for many magnitudes and zeros (tests/golden has how)."""
    rows = json.loads(GOLDEN.read_text())
    x, theirs = torch.tensor(rows["x"]), torch.tensor(rows[name])
    ours = round_to_mxfp4(x) if name == "mxfp4" else round_to_nvfp4(x, x.abs().max().view(1, 1))
    assert torch.equal(ours, theirs)


@given(
    hnp.arrays("float32", st.tuples(st.integers(1, 3), st.integers(1, 70)), elements=st.floats(-1e4, 1e4, width=32)),
    st.integers(2, 8),
    st.sampled_from([0, 1, 16, 128]),
)
def test_no_integer_is_further_than_half_a_step(values: object, bits: int, group: int) -> None:
    x = torch.as_tensor(values)
    steps = in_groups(x, group).abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    error = in_groups((round_to_integers(x, bits, group) - x).abs(), group)
    assert bool((error <= steps * 0.5001 + 1e-30).all())


@given(hnp.arrays("float32", (2, 48), elements=st.floats(-(2.0**66), 2.0**66, width=32)))
def test_block_floats_are_idempotent_and_keep_zeros_and_signs(values: object) -> None:
    x = torch.as_tensor(values)
    for rounded in (round_to_mxfp4(x), round_to_nvfp4(x)):
        assert bool(rounded.isfinite().all())
        assert bool((rounded[x == 0] == 0).all())
        assert bool((rounded * x >= 0).all())
    once = round_to_mxfp4(x)
    assert torch.equal(round_to_mxfp4(once), once)
