import math

import numpy as np
import pytest
import torch

from oasis_cli.calibration.statistics import SiteStatistics
from oasis_cli.errors import InputError


def test_by_hand() -> None:
    statistics = SiteStatistics.empty(4)
    x = torch.tensor([[8.0, -4.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    gradient = torch.tensor([[9.0, 9.0, 0.5, 0.25], [9.0, 9.0, 9.0, 9.0]])
    # one outlier a side: 8 and -4 go; 2/8 and 1/8 stay, weighing (8 * 0.5)**2 and (8 * 0.25)**2; the zero token goes
    statistics.add("site", x, gradient, fraction=0.25, kind="absmax")
    points = statistics.histogram.points()
    assert points.values.tolist() == [0.125, 0.25]
    assert points.weights.tolist() == [4.0, 16.0]
    assert statistics.second_moments.tolist() == [64.0, 16.0, 4.0, 1.0]
    assert statistics.thresholds().tolist() == [-2.0, 4.0]  # means of the tokens' own: (-4 + 0) / 2 and (8 + 0) / 2
    summary = statistics.summary()
    assert (summary["tokens"], summary["zero_tokens"], summary["inliers"]) == (2, 1, 2)
    assert summary["tied_tokens"] == 1  # the zero token's values are all equal
    assert summary["scale"] == {"mean": 4.0, "min": 0.0, "max": 8.0}


def test_sequences_add_up_and_state_round_trips() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(2, 30, 20, generator=generator)
    whole, parts = SiteStatistics.empty(20), SiteStatistics.empty(20)
    whole.add("site", x, gradient, 0.05, "rms")
    parts.add("site", x[:11], gradient[:11], 0.05, "rms")
    parts = SiteStatistics.from_state({name: value.clone() for name, value in parts.state().items()})
    parts.add("site", x[11:], gradient[11:], 0.05, "rms")
    for name, value in whole.state().items():
        torch.testing.assert_close(parts.state()[name], value, rtol=1e-12, atol=1e-12)


def test_moments_against_numpy() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    statistics = SiteStatistics.empty(8)
    statistics.add("site", x, torch.ones_like(x), 0.0, "absmax")
    np.testing.assert_allclose(
        statistics.second_moments.numpy() / 50, (x.double().numpy() ** 2).mean(axis=0), rtol=1e-6
    )
    assert statistics.summary()["inliers"] == 400


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["activation", "gradient"])
def test_what_is_not_finite_names_the_site(bad: float, where: str) -> None:
    x, gradient = torch.randn(3, 6), torch.randn(3, 6)
    (x if where == "activation" else gradient)[1, 2] = bad
    with pytest.raises(InputError, match=rf"blocks\.0\.mlp: an? {where} is not finite"):
        SiteStatistics.empty(6).add("blocks.0.mlp", x, gradient, 0.2, "absmax")
