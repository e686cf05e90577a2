import pytest
import torch

from oasis_cli.numerics.hadamard import hadamard_factors, hadamard_matrix, rotate

# widths of SmolLM2, Qwen2, LLaMA-2-7B, -13B, -3-8B: residual stream and MLP
WIDTHS = [576, 1536, 896, 4864, 4096, 11008, 5120, 13824, 14336, 28672, 18944]


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 20, 24 // 2, 28, 36, 60, 76, 100, 108, 148, 344])
def test_rows_are_orthogonal(order: int) -> None:
    """By definition; 28 and 36 are of Paley's second kind, 100 and 344 stand over GF(49) and GF(343)."""
    matrix = hadamard_matrix(order)
    assert set(matrix.unique().tolist()) <= {1.0, -1.0}
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order))


def test_sylvester_of_order_four_by_hand() -> None:
    assert hadamard_matrix(4).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_widths_of_known_models_have_one(width: int) -> None:
    factors = hadamard_factors(width)
    assert factors is not None
    assert factors[0] * factors[1] == width


@pytest.mark.parametrize("order", [3, 6, 9, 18, 172, 45 * 64])
def test_orders_without_one(order: int) -> None:
    """None exists for 3, 6, 9 and 18; for 172 there is one, which is not Paley's. 45 * 64 = 180 * 16 does exist."""
    assert (hadamard_factors(order) is None) == (order != 45 * 64)
    if hadamard_factors(order) is None:
        with pytest.raises(ValueError, match=f"order {order}"):
            rotate(torch.zeros(2, order))


@pytest.mark.parametrize("width", [1, 2, 12, 64, 576, 1536])
def test_a_rotation_turns_back_and_keeps_lengths(width: int) -> None:
    x = torch.randn(3, 5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = rotate(torch.eye(width, dtype=torch.float64))
    torch.testing.assert_close(rotate(x), x @ matrix)
    torch.testing.assert_close(rotate(x) @ matrix.T, x)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1))


def test_an_outlier_is_spread_evenly() -> None:
    x = torch.zeros(1, 576)
    x[0, 17] = 24.0
    torch.testing.assert_close(rotate(x).abs(), torch.ones(1, 576))  # 24 / sqrt(576)


def test_impossible_orders() -> None:
    for order in (0, -4, 172):
        with pytest.raises(ValueError, match=str(order)):
            hadamard_matrix(order)
