"""The layer against plain loops over float64, written from the formula and not from the code."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.gemm import ActivationFormat, QuantizedWeight, oasis_linear
from oasis_cli.numerics.lut import build_lut


def reference(x: np.ndarray, fmt: ActivationFormat, weight: QuantizedWeight) -> tuple[np.ndarray, float]:
    """y by the formula: nearest centroids, counts of concatenated indices, one weighted sum, residuals of outliers.

    Also the greatest sum of magnitudes behind a y, which is what rounding is relative to where terms cancel.
    """
    act = fmt.codebook.centroids.double().numpy()
    wgt = weight.codebook.centroids.double().numpy()
    lut = np.array([np.float64(np.float16(a * w)) if not fmt.codebook.step else a * w for a in act for w in wgt])
    index, scale = weight.index.numpy(), weight.scale.double().numpy()
    y, largest = np.zeros((len(x), len(index))), 0.0
    for m, token in enumerate(x.astype(np.float64)):
        s = np.abs(token).max()
        edges = [np.float32(np.float32(s) * np.float32((a + b) / 2)) for a, b in itertools.pairwise(act)]
        i = [sum(edge <= np.float32(v) for edge in edges) for v in token]
        order = sorted(range(len(token)), key=lambda c: (-token[c], c))
        order_up = sorted(range(len(token)), key=lambda c: (token[c], c))
        outliers = {*order[: fmt.outliers_a_side], *order_up[: fmt.outliers_a_side]}
        for n in range(len(index)):
            counts: dict[int, int] = {}
            for c in range(len(token)):
                key = i[c] * len(wgt) + int(index[n, c])
                counts[key] = counts.get(key, 0) + 1
            assert sum(counts.values()) == len(token)
            total = s * math.fsum(count * lut[key] for key, count in counts.items())
            total += math.fsum((token[c] - s * act[i[c]]) * wgt[index[n, c]] for c in outliers)
            y[m, n] = scale[n] * total
            size = s * sum(count * abs(lut[key]) for key, count in counts.items()) + np.abs(token).max() * len(token)
            largest = max(largest, scale[n] * size)
    return (y if weight.bias is None else y + weight.bias.double().numpy()), largest + 1


def random_layer(
    seed: int, M: int, K: int, N: int, k: int, grid: str, bits: tuple[int, int] = (4, 4)
) -> tuple[torch.Tensor, ActivationFormat, QuantizedWeight]:
    g = torch.Generator().manual_seed(seed)

    def codebook(levels: int) -> Codebook:
        if grid == "int8":
            integers = torch.randint(-127, 128, (levels,), generator=g).sort().values
            return Codebook((integers * 2.0**-7).half(), 2.0**-7)
        return Codebook(torch.randn(levels, generator=g).div(2).sort().values.half())

    weight = QuantizedWeight(
        torch.randint(0, 2 ** bits[0], (N, K), generator=g, dtype=torch.uint8),
        codebook(2 ** bits[0]),
        torch.rand(N, generator=g).half(),
        torch.randn(N, generator=g) if seed % 2 else None,
    )
    x = torch.randn(M, K, generator=g) * torch.rand(M, 1, generator=g).mul(4).exp()
    return x, ActivationFormat(codebook(2 ** bits[1]), "absmax", k), weight


@pytest.mark.parametrize("grid", ["int8", "fp16"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_agrees_with_the_formula(grid: str, data: st.DataObject) -> None:
    K = data.draw(st.integers(1, 40))
    bits = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    x, fmt, weight = random_layer(
        data.draw(st.integers(0, 99)),
        data.draw(st.integers(1, 6)),
        K,
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(0, K // 2)),
        grid,
        bits,
    )
    expected, size = reference(x.numpy(), fmt, weight)
    found = oasis_linear(x, fmt, weight).double().numpy()
    # five roundings to float32 on the way, each 2**-24 of what it rounds
    assert np.abs(found - expected).max() <= 5 * 2**-24 * size


def test_by_hand_as_in_figure_6() -> None:
    """One bit each: centroids 1 and 3 of activations (of a token with scale 4: 4 and 12), -1 and 2 of weights."""
    fmt = ActivationFormat(Codebook(torch.tensor([0.25, 0.75]).half(), 0.25), "absmax", 0)
    weight = QuantizedWeight(
        torch.tensor([[0, 1, 1, 0, 1, 0]], dtype=torch.uint8),
        Codebook(torch.tensor([-1.0, 2.0]).half(), 1.0),
        torch.tensor([0.5]).half(),
        torch.tensor([10.0]),
    )
    x = torch.tensor([[1.0, 4.0, 0.0, 3.0, 2.0, -4.0]])  # boundary 4 * 0.5 = 2: indices 0 1 0 1 1 0
    # concatenated: 00 11 01 10 11 00; LUT: 00 -0.25, 01 0.5, 10 -0.75, 11 1.5; counts 2 1 1 2
    # main = 2 * -0.25 + 0.5 - 0.75 + 2 * 1.5 = 2.25; y = 0.5 * 4 * 2.25 + 10
    assert oasis_linear(x, fmt, weight).tolist() == [[14.5]]


def test_outliers_are_as_good_as_unquantized() -> None:
    """Every channel an outlier: the activations count in full, whatever their codebook."""
    x, fmt, weight = random_layer(4, 3, 10, 4, 5, "int8")
    dense = x.double() @ weight.dequantize().double().T
    torch.testing.assert_close(oasis_linear(x, fmt, weight).double(), dense, rtol=1e-6, atol=1e-6)


def test_few_and_many_tokens_give_the_same_bits() -> None:
    x, fmt, weight = random_layer(6, 16, 96, 24, 4, "int8")
    one_by_one = torch.cat([oasis_linear(x[m : m + 1], fmt, weight) for m in range(16)])
    assert torch.equal(one_by_one, oasis_linear(x, fmt, weight))


def test_long_reductions_stay_exact() -> None:
    """127 * 127 * 5000 is beyond 2**24, where a float32 sum of integers would start to round."""
    K = 5000
    fmt = ActivationFormat(Codebook(torch.tensor([-127.0, 127.0]).half(), 1.0), "absmax", 0)
    weight = QuantizedWeight(
        torch.ones(1, K, dtype=torch.uint8), Codebook(torch.tensor([-126.0, 127.0]).half(), 1.0), torch.ones(1).half()
    )
    x = torch.ones(1, K)
    x[0, :2] = -1.0
    expected = (K - 2) * 127 * 127 - 2 * 127 * 127
    assert oasis_linear(x, fmt, weight).item() == np.float32(expected)


def test_degenerate_tokens() -> None:
    x, fmt, weight = random_layer(5, 4, 9, 3, 2, "int8")
    assert weight.bias is not None
    x[0], x[1, 3], x[2] = 0.0, math.inf, 1.5
    y = oasis_linear(x, fmt, weight)
    assert torch.equal(y[0], weight.bias)
    assert y[1].isnan().all()
    assert y[2:].isfinite().all()
    assert oasis_linear(x[:0], fmt, weight).shape == (0, 3)
    assert oasis_linear(x.view(2, 2, 9), fmt, weight).shape == (2, 2, 3)


def test_static_outliers_are_those_beyond_the_thresholds() -> None:
    x, fmt, weight = random_layer(2, 3, 12, 2, 0, "int8")
    everything = ActivationFormat(fmt.codebook, "absmax", 0, torch.tensor([math.inf, -math.inf]))
    dense = x.double() @ weight.dequantize().double().T
    torch.testing.assert_close(oasis_linear(x, everything, weight).double(), dense, rtol=1e-6, atol=1e-6)
    nothing = ActivationFormat(fmt.codebook, "absmax", 0, torch.tensor([-math.inf, math.inf]))
    assert torch.equal(oasis_linear(x, nothing, weight), oasis_linear(x, fmt, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_widened_exactly(dtype: torch.dtype) -> None:
    x, fmt, weight = random_layer(8, 5, 33, 4, 3, "int8")
    x = x.to(dtype)
    assert torch.equal(oasis_linear(x, fmt, weight), oasis_linear(x.float(), fmt, weight).to(dtype))


def test_lut_entries_are_exact_on_the_int8_grid_and_rounded_on_fp16() -> None:
    third = Codebook(torch.tensor([1 / 3, 2 / 3]).half())
    lut = build_lut(third, third)
    wide = [float(np.float16(v)) for v in (1 / 3, 2 / 3)]
    assert lut.entries.tolist() == [float(np.float16(a * b)) for a in wide for b in wide]
    on_grid = build_lut(
        Codebook(torch.tensor([-1.5, 2.0]).half(), 0.5), Codebook(torch.tensor([0.25, 0.75]).half(), 0.25)
    )
    assert on_grid.entries.tolist() == [-3, -9, 4, 12]
    assert on_grid.step == 0.125
    assert on_grid.entries.dtype == torch.int16


def test_mixed_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="same grid"):
        build_lut(Codebook(torch.tensor([1.0]).half(), 1.0), Codebook(torch.tensor([1.0]).half()))
