"""Offline against online, computed once more here with NumPy on what the model itself shows."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result

from oasis_cli.calibration.consistency import Consistency
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
    found = json.loads((tmp_path / "r.json").read_text())["sites"]
    assert len(found) == 16
    site, ordered = found[SITE], np.sort(activations, axis=1)  # k = ceil(0.005 * 128) = 1 a side
    lower, upper = read_calibration(chain.calibration).sites[SITE].thresholds.tolist()
    assert site["threshold"]["offline"] == {"lower": lower, "upper": upper}
    for side, own in (("lower", ordered[:, 0]), ("upper", ordered[:, -1])):
        wanted = np.quantile(own.astype("f8"), [0, 0.05, 0.5, 0.95, 1])
        assert site["threshold"]["online"][side] == pytest.approx(wanted.tolist(), rel=1e-3)
    spread = np.abs(ordered[:, -1] - upper).mean() / abs(upper)
    assert site["threshold"]["spread"] == pytest.approx(spread, rel=1e-3)
    kept = ((activations < lower) | (activations > upper)).mean(axis=1)
    assert site["outlier_share"]["nominal"] == 2 / 128
    assert site["outlier_share"]["static_mean"] == pytest.approx(kept.mean(), abs=1e-4)
    assert site["outlier_share"]["static"][0::4] == pytest.approx([kept.min(), kept.max()], abs=1e-4)
    assert all(0 <= each["centroids"]["extra_error"] < 0.5 for each in found.values())


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
        assert float(site.online_upper.mean()) == pytest.approx(site.offline[1], rel=1e-5)


def test_figures_by_hand() -> None:
    site = Consistency(
        site="s",
        offline=(-1.0, 2.0),
        online_lower=torch.tensor([-1.0, -1.0]),
        online_upper=torch.tensor([1.0, 4.0]),
        nominal_share=0.01,
        static_shares=torch.tensor([0.0, 0.5]),
        offline_centroids=torch.tensor([0.0, 1.5, 4.0]),
        online_centroids=torch.tensor([0.0, 2.0, 4.0]),
        extra_error=0.1,
    )
    assert site.threshold_spread == 0.75  # (1 + 2) / 2 over 2
    assert site.centroid_shift == 0.125  # 0.5 of a span of 4
    assert site.to_json()["outlier_share"]["static_mean"] == 0.25


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture(chain: Chain, tmp_path: Path, cli: Callable[..., Result], suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is part of the extra plots")
    out = tmp_path / f"p.{suffix}"
    args = ("inspect", chain.calibration, "--model", chain.model, *TEXT, "--site", SITE, "--plot", out)
    done = cli(*args)
    assert done.exit_code == 0, done.stderr
    opening = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert out.read_bytes().startswith(opening)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--text", "embedded"), 2, "--text and --model go together"),
        (("--plot", "p.png"), 2, "--site and --plot need --text and --model"),
        (("--site", "model.layers.2.self_attn.o_prj", "--plot", "p.png"), 3, f"did you mean {SITE}?"),
        (("--plot", "p.docx"), 3, "unknown kind of picture"),
        (("--plot", "absent/p.png"), 3, "absent"),
        (("--seqlen", 100_000), 3, "positions"),
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
    monkeypatch.chdir(tmp_path)
    more = () if status == 2 else ("--model", chain.model, *TEXT)
    done = cli("inspect", chain.calibration, *more, *options)
    assert (done.exit_code, done.stderr.count("\n")) == (status, 1), done.stderr
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


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
