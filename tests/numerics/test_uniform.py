import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oasis_cli.numerics.uniform import in_groups, round_to_integers, round_to_mxfp4, round_to_nvfp4


def wide_range(rows: int, K: int, seed: int = 0) -> torch.Tensor:
    """Values over many magnitudes, zeros and a row of zeros among them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=draw) * torch.randn(rows, K, generator=draw).mul(3).exp()
    x[0] = 0
    x[1, ::5] = 0
    return x


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


@pytest.mark.parametrize("K", [32, 576])
def test_mxfp4_is_torchaos(K: int) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is part of the extra dev")
    x = wide_range(64, K)
    theirs = mx.MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32).dequantize(torch.float32)
    assert torch.equal(round_to_mxfp4(x), theirs)


@pytest.mark.parametrize("K", [32, 576])
def test_nvfp4_is_torchaos(K: int) -> None:
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is part of the extra dev")
    x = torch.randn(64, K, generator=torch.Generator().manual_seed(1))
    largest = x.abs().max()
    scaled = nv.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=nv.per_tensor_amax_to_scale(largest))
    assert torch.equal(round_to_nvfp4(x, largest.view(1, 1)), scaled.dequantize(torch.float32))


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
