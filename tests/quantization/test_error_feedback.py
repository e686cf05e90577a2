"""Error feedback, scales and codebooks fitted to what a layer gives out."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_cli.numerics.codebook import Codebook, assign_indices
from oasis_cli.quantization.error_feedback import ErrorFeedback, damped, inverse_factor
from oasis_cli.quantization.kmeans_weights import quantize_weight
from oasis_cli.quantization.output_aware import SiteSolver, quantize_for_output
from oasis_cli.quantization.refine import fit_scales, output_errors


def correlated(K: int, tokens: int = 400, seed: int = 0) -> torch.Tensor:
    """Inputs of a few common factors, as activations are; float32 [tokens, K]."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(tokens, 3, generator=draw) @ torch.randn(3, K, generator=draw)
    return common + 0.3 * torch.randn(tokens, K, generator=draw)


def test_two_channels_by_hand() -> None:
    """H = [[2, 1], [1, 1]], levels -1, 0, 1: the error of channel 0, 0.4, moves channel 1 from 0.3 to 0.3 + 0.4 / 1."""
    H = torch.tensor([[2.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    codebook = Codebook(torch.tensor([-1.0, 0.0, 1.0, 1.0]).half())
    found = ErrorFeedback(H).assign(torch.tensor([[0.4, 0.3]]), torch.ones(1).half(), codebook)
    # 0.4 goes to 0, which leaves 0.4 * x0; the best for channel 1 is then 0.3 + 0.4 * H01 / H11 = 0.7, hence 1
    assert codebook.centroids[found.int()].tolist() == [[0.0, 1.0]]
    assert codebook.centroids[
        assign_indices(torch.tensor([[0.4, 0.3]]), torch.ones(1), codebook.centroids).int()
    ].tolist() == [[0.0, 0.0]]


def test_the_factor_is_that_of_the_inverse() -> None:
    x = correlated(7).double()
    H = damped(x.T @ x, 0.01)
    U = inverse_factor(H)
    torch.testing.assert_close(U.T @ U @ H, torch.eye(7, dtype=torch.float64), atol=1e-8, rtol=0)
    assert bool((U.tril(-1) == 0).all())


def test_uncorrelated_channels_go_to_the_nearest_centroid() -> None:
    codebook = Codebook(torch.linspace(-1, 1, 16).half())
    weight = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(dim=1).half()
    found = ErrorFeedback(torch.eye(9, dtype=torch.float64)).assign(weight, scale, codebook)
    assert torch.equal(found, assign_indices(weight, scale.float(), codebook.centroids))


def test_never_far_from_the_best_of_all_assignments() -> None:
    """Against every one of 3**5 assignments; greedy, so not equal, but far better than rounding."""
    H = damped(correlated(5).T @ correlated(5), 0.01)
    levels = torch.tensor([-1.0, 0.0, 1.0])
    codebook = Codebook(torch.tensor([-1.0, 0.0, 1.0, 1.0]).half())
    every = torch.tensor(list(itertools.product(levels.tolist(), repeat=5)))
    weights = torch.rand(40, 5, generator=torch.Generator().manual_seed(1)) * 2 - 1
    found = codebook.centroids.float()[ErrorFeedback(H).assign(weights, torch.ones(40).half(), codebook).int()]
    rounded = weights.round()
    best = torch.stack([output_errors(weight - every, H).min() for weight in weights]).sum()
    fed_back, nearest = output_errors(weights - found, H).sum(), output_errors(weights - rounded, H).sum()
    assert best <= fed_back < 0.5 * nearest
    assert fed_back < 3 * best


@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from(["int8", "fp16"]))
@settings(max_examples=25, deadline=None)
def test_never_worse_than_kmeans_alone(seed: int, bits: int, grid: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = correlated(24, seed=seed)
    weight = torch.randn(10, 24, generator=draw) * torch.rand(10, 1, generator=draw)
    weight[3] = 0
    solver = SiteSolver((x.T @ x).double(), 0.01)
    plain, _ = quantize_weight(weight, bits, grid, "w")  # type: ignore[arg-type]
    found, report = quantize_for_output(weight, solver, bits, grid, "w")  # type: ignore[arg-type]
    after = output_errors(weight - found.dequantize(), solver.hessian).sum()
    assert after <= output_errors(weight - plain.dequantize(), solver.hessian).sum() * (1 + 1e-9)
    assert bool((found.dequantize()[3] == 0).all())
    assert report.output_error == pytest.approx(float(after / output_errors(weight, solver.hessian).sum()), rel=1e-6)


@pytest.mark.parametrize("moments", ["zero", "one channel dead", "singular"])
def test_moments_that_cannot_be_inverted(moments: str) -> None:
    x = correlated(12)
    if moments == "zero":
        x = torch.zeros_like(x)
    elif moments == "one channel dead":
        x[:, 4] = 0
    else:
        x = x[:2]
    weight = torch.randn(6, 12, generator=torch.Generator().manual_seed(2))
    found, _ = quantize_for_output(weight, SiteSolver((x.T @ x).double(), 0.01), 4, "int8", "w")
    error = (weight - found.dequantize()).square().sum() / weight.square().sum()
    assert float(error) < 0.2


def test_layers_of_one_channel_and_of_zeros() -> None:
    one = SiteSolver(torch.ones(1, 1, dtype=torch.float64), 0.01)
    found, _ = quantize_for_output(torch.tensor([[0.5], [-2.0]]), one, 4, "int8", "w")
    torch.testing.assert_close(found.dequantize(), torch.tensor([[0.5], [-2.0]]), atol=2e-2, rtol=1e-2)
    nothing, report = quantize_for_output(
        torch.zeros(3, 4), SiteSolver(torch.eye(4, dtype=torch.float64), 0.01), 4, "int8", "w"
    )
    assert not nothing.dequantize().any()
    assert report.output_error == 0


def test_scales_are_least_squares() -> None:
    """Against torch's own solver, through the square root of H."""
    x = correlated(8)
    H = (x.T @ x).double()
    weight, centroids = torch.randn(4, 8), torch.randint(-3, 4, (4, 8)).float()
    found = fit_scales(weight, centroids, H, torch.full((4,), 1e-3).half())
    for n in range(4):
        wanted = torch.linalg.lstsq((x @ centroids[n])[:, None].double(), (x @ weight[n])[:, None].double()).solution
        if float(wanted) > 0.01:
            assert float(found[n]) == pytest.approx(float(wanted), rel=2e-3)
