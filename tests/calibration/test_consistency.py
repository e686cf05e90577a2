"""Offline against online, computed once more here with NumPy on what the model itself shows."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result

from oasis_cli.calibration.consistency import Consistency, OfflineOnline
from oasis_cli.data.text import load_text
from oasis_cli.data.windows import token_windows
from oasis_cli.formats.calibration import read_calibration
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.pipeline import consistency
from tests.conftest import Chain

SITE = "model.layers.2.self_attn.o_proj"
TEXT = ("--text", "embedded", "--samples", 2, "--seqlen", 64)


@pytest.fixture(scope="module")
def activations(chain: Chain) -> np.ndarray:
    """What reaches one site on two windows, float32 [128, 128]."""
    checkpoint = open_checkpoint(chain.model)
    windows = token_windows(load_text("embedded", "evaluation"), checkpoint.load_tokenizer(), 64, 2)
    model, seen = checkpoint.load_model(), []
    model.get_submodule(SITE).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=windows.tokens)
    return seen[0].reshape(-1, 128).numpy()


def test_thresholds_and_shares_agree_with_numpy(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], activations: np.ndarray
) -> None:
    done = cli("inspect", chain.calibration, "--model", chain.model, *TEXT, "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["text"], found["samples"], found["seqlen"]) == ("embedded (evaluation part)", 2, 64)
    assert found["inputs"] == {
        "model": open_checkpoint(chain.model).digest,
        "calibration": read_calibration(chain.calibration).digest,
        "embedded (evaluation part)": load_text("embedded", "evaluation").digest,
    }
    assert len(found["sites"]) == 16
    site, ordered = found["sites"][SITE], np.sort(activations.astype("f8"), axis=1)  # k = ceil(0.005 * 128) = 1 a side
    lower, upper = read_calibration(chain.calibration).sites[SITE].thresholds.tolist()
    for side, static, own in (("lower", lower, ordered[:, 0]), ("upper", upper, ordered[:, -1])):
        threshold = site["threshold"][side]
        assert threshold["offline"] == static
        assert threshold["online"] == pytest.approx(spread_of(own), rel=1e-3)
        assert threshold["mean_difference"] == pytest.approx(np.abs(own - static).mean() / abs(static), rel=1e-3)
        # the static threshold lies among the tokens' own here, so these span the scale
        rmse = np.sqrt(np.mean((own - static) ** 2)) / (own.max() - own.min())
        assert threshold["rmse"] == pytest.approx(rmse, rel=1e-3)
    kept = ((activations < lower) | (activations > upper)).mean(axis=1)
    assert site["outlier_share"]["nominal"] == 2 / 128
    assert site["outlier_share"]["static"] == pytest.approx(spread_of(kept), abs=1e-4)


def spread_of(values: np.ndarray) -> dict[str, float]:
    least, p5, median, p95, most = np.quantile(values, [0, 0.05, 0.5, 0.95, 1])
    return {"mean": values.mean(), "min": least, "p5": p5, "median": median, "p95": p95, "max": most}


def test_the_error_of_centroids_agrees_with_numpy(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], activations: np.ndarray
) -> None:
    """With --importance error, x / s_t weighs s_t**2: what counts is the squared error of x itself."""
    args = ("--importance", "error", "--samples", 2, "--seqlen", 64, "--out", tmp_path / "c")
    assert cli("calibrate", chain.model, *args).exit_code == 0
    done = cli("inspect", tmp_path / "c", "--model", chain.model, *TEXT, "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.stderr
    centroids = json.loads((tmp_path / "r.json").read_text())["sites"][SITE]["centroids"]
    offline, online = np.array(centroids["offline"]), np.array(centroids["online"])
    x, scale = activations.astype("f8"), np.abs(activations).max(axis=1, keepdims=True).astype("f8")
    inside = np.ones(x.shape, dtype=bool)
    np.put_along_axis(inside, x.argmax(axis=1)[:, None], False, axis=1)
    np.put_along_axis(inside, x.argmin(axis=1)[:, None], False, axis=1)

    def error(codebook: np.ndarray) -> float:
        distance = np.abs(x[..., None] - scale[..., None] * codebook).min(axis=2)
        return float((distance[inside] ** 2).sum())

    assert error(online) < error(offline)
    # the tool sums over a histogram, whose bins are 1/256 of an octave wide
    assert centroids["extra_error"] == pytest.approx(error(offline) / error(online) - 1, rel=0.02)
    span = max(offline[-1], online[-1]) - min(offline[0], online[0])
    assert centroids["largest_shift"] == pytest.approx(np.abs(offline - online).max() / span)
    assert centroids["rmse"] == pytest.approx(np.sqrt(np.mean((offline - online) ** 2)) / span)


def test_on_its_own_text_nothing_is_lost(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    """Calibrated on the very windows: centroids are the best there are, thresholds the means of the tokens' own."""
    text = tmp_path / "t.txt"
    text.write_text(load_text("embedded", "evaluation").text[:4000])
    args = ("--dataset", text, "--samples", 1, "--seqlen", 256, "--out", tmp_path / "c")
    assert cli("calibrate", chain.model, *args).exit_code == 0
    calibration = read_calibration(tmp_path / "c")
    windows = calibration.tokens

    class Same:
        tokens = windows

    found = consistency.measure_consistency(open_checkpoint(chain.model), calibration, Same())  # type: ignore[arg-type]
    for site in found:
        assert site.extra_error == pytest.approx(0, abs=1e-6)
        assert site.centroid_shift == pytest.approx(0, abs=1e-6)
        assert site.centroids.rmse == pytest.approx(0, abs=1e-6)
        for side in (site.lower, site.upper):
            assert float(side.online.mean()) == pytest.approx(float(side.offline), rel=1e-5)


def pair(offline: list[float], online: list[float]) -> OfflineOnline:
    return OfflineOnline(torch.tensor(offline, dtype=torch.float64), torch.tensor(online, dtype=torch.float64))


def test_figures_by_hand() -> None:
    site = Consistency(
        site="s",
        lower=pair([0.0], [0.0, 0.0]),
        upper=pair([2.0], [1.0, 5.0]),
        nominal_share=0.01,
        static_shares=torch.tensor([0.0, 0.5], dtype=torch.float64),
        centroids=pair([0.0, 1.5, 4.0], [0.0, 2.0, 3.0]),
        extra_error=0.1,
    )
    lower, upper = site.to_json()["threshold"].values()
    assert upper["online"] == {"mean": 3, "min": 1, "p5": pytest.approx(1.2), "median": 3, "p95": 4.8, "max": 5}
    assert upper["mean_difference"] == 1  # (1 + 3) / 2 over 2
    assert upper["rmse"] == pytest.approx((0.3125) ** 0.5)  # 0.25 against 0 and 1: (0.0625 + 0.5625) / 2
    assert (lower["mean_difference"], lower["rmse"]) == (None, 0)  # nothing to divide by, and no span
    assert [values.tolist() for values in site.centroids.normalised()] == [[0, 0.375, 1], [0, 0.5, 0.75]]
    assert site.centroid_shift == 0.25
    assert site.centroids.rmse == pytest.approx((0.078125 / 3) ** 0.5)  # 0.125**2 + 0.25**2
    assert site.to_json()["outlier_share"]["static"]["mean"] == 0.25


@pytest.mark.parametrize(
    ("name", "opening", "site"),
    [("p.png", b"\x89PNG", SITE), ("new/P.PNG", b"\x89PNG", "2.self_attn.o"), ("p.svg", b"<?xml", SITE)],
)
def test_the_picture(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], name: str, opening: bytes, site: str
) -> None:
    out = tmp_path / name
    done = cli("inspect", chain.calibration, "--model", chain.model, *TEXT, "--site", site, "--plot", out)
    assert done.exit_code == 0, done.stderr
    assert out.read_bytes().startswith(opening)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    if name.endswith("svg"):  # beside its glyphs, each text stands in a comment
        assert f"<!-- {SITE} -->" in out.read_text()


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--text", "embedded"), 2, "--text and --model go together"),
        (("--plot", "p.png"), 2, "--plot goes with --text and --model"),
        (("--site", SITE), 2, "--site goes with --plot"),
        (("--site", "model.layers.2.self_attn.o_prj", "--plot", "p.png"), 3, f"did you mean {SITE}?"),
        (("--site", "2.self_attn.q+k", "--plot", "p.png"), 3, "did you mean 2.self_attn.q+k+v?"),
        (("--plot", "p.docx"), 3, "unknown kind of picture"),
        (("--plot", "p"), 3, "unknown kind of picture"),
        (("--plot", "file/p.png"), 3, "file/p.png: cannot be written"),
        (("--plot", "folder.png"), 3, "folder.png: is a folder"),
        (("--seqlen", 100_000), 3, "positions"),
        (("--text", "file"), 3, "tokens are fewer than the seqlen of 64"),
    ],
)
def test_bad_input(
    chain: Chain,
    tmp_path: Path,
    cli: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    status: int,
    said: str,
) -> None:
    """All of it is known before the model runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(consistency, "measure_consistency", None)
    (tmp_path / "file").write_text("a")
    (tmp_path / "folder.png").mkdir()
    more = () if status == 2 else ("--model", chain.model, *TEXT)
    done = cli("inspect", chain.calibration, *more, *options)
    assert (done.exit_code, done.stderr.count("\n")) == (status, 1), done.stderr
    assert said in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


def test_without_matplotlib_the_cure_is_named(
    chain: Chain, tmp_path: Path, cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = cli("inspect", chain.calibration, "--model", chain.model, *TEXT, "--plot", tmp_path / "p.png")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert 'pip install "oasis-cli[plots]"' in done.stderr


def test_what_is_no_calibration_is_refused(chain: Chain, cli: Callable[..., Result]) -> None:
    for path in (chain.model, chain.model / "config.json"):
        done = cli("inspect", path, "--model", chain.model, *TEXT)
        assert (done.exit_code, done.stderr.count("\n")) == (3, 1)
        assert str(path) in done.stderr


def test_another_model_is_refused(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    model = open_checkpoint(chain.model).load_model()
    model.model.norm.weight[0] += 1
    model.save_pretrained(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).write_bytes((chain.model / name).read_bytes())
    done = cli("inspect", chain.calibration, "--model", tmp_path / "other", *TEXT)
    assert done.exit_code == 3
    assert "not the model that was calibrated" in done.stderr


def test_without_outliers_there_is_nothing_to_compare(chain: Chain, tmp_path: Path, cli: Callable[..., Result]) -> None:
    args = ("--samples", 1, "--seqlen", 64, "--outliers", 0, "--out", tmp_path / "c")
    assert cli("calibrate", chain.model, *args).exit_code == 0
    done = cli("inspect", tmp_path / "c", "--model", chain.model, *TEXT)
    assert done.exit_code == 3
    assert "without outliers" in done.stderr
