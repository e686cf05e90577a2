import json
from pathlib import Path

import numpy as np
import pytest
import torch

from oasis_cli.calibration import CalibrationSettings, calibrate
from oasis_cli.calibration.fisher import visit_sites
from oasis_cli.data.text import load_text
from oasis_cli.data.windows import calibration_windows
from oasis_cli.errors import InputError
from oasis_cli.formats.calibration import BITS, read_calibration
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.models.sites import find_sites
from oasis_cli.numerics.outliers import find_outliers
from tests.conftest import Chain

OPTIONS = CalibrationSettings(samples=2, seqlen=64)


def raw_points(chain: Chain, site_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Every inlier of a site with its Fisher weight, never binned, as the chain's calibration saw them."""
    checkpoint = open_checkpoint(chain.model)
    windows = calibration_windows(load_text(None, "calibration"), checkpoint.load_tokenizer(), 4, 128, 0)
    model = checkpoint.load_model()
    values, weights = [], []

    def visit(site: object, x: torch.Tensor, gradient: torch.Tensor) -> None:
        scale = x.abs().amax(dim=1, keepdim=True)
        inlier = ~find_outliers(x, 1)  # K = 128: ceil(0.005 * 128) = 1
        values.append((x / scale)[inlier].double().numpy())
        weights.append((gradient * scale)[inlier].double().numpy() ** 2)

    sites = [site for site in find_sites(model) if site.name == site_name]
    for tokens in windows.tokens:
        visit_sites(model, sites, tokens[None], visit)
    return np.concatenate(values), np.concatenate(weights)


def price(centroids: np.ndarray, values: np.ndarray, weights: np.ndarray) -> float:
    return float(weights @ np.abs(values[:, None] - centroids[None, :]).min(axis=1) ** 2)


@pytest.mark.parametrize("bits", [2, 4])
def test_within_half_a_percent_of_the_best_on_the_raw_values(chain: Chain, bits: int) -> None:
    """Priced on every value by itself: a long plain Lloyd run from our centroids gains nothing to speak of."""
    name = "model.layers.1.self_attn.q_proj+k_proj+v_proj"
    values, weights = raw_points(chain, name)
    ours = read_calibration(chain.calibration).sites[name].centroids[bits].double().numpy()
    polished = ours.copy()
    for _ in range(50):
        nearest = np.abs(values[:, None] - polished[None, :]).argmin(axis=1)
        polished = np.bincount(nearest, weights * values, 2**bits) / np.bincount(nearest, weights, 2**bits)
    assert price(ours, values, weights) <= 1.005 * price(polished, values, weights)


def test_artifact_says_what_it_holds(chain: Chain) -> None:
    calibration = read_calibration(chain.calibration)
    assert len(calibration.sites) == 16  # four blocks of four sites
    assert calibration.model_digest == open_checkpoint(chain.model).digest
    for site in calibration.sites.values():
        for bits in BITS:
            assert site.centroids[bits].shape == (2**bits,)
            assert (site.centroids[bits].diff() >= 0).all()
        assert site.thresholds[0] < 0 < site.thresholds[1]
        assert (site.second_moments >= 0).all()
    manifest = json.loads((chain.calibration / "calibration.json").read_text())
    assert manifest["tokens"] == 4 * 128
    for entry in manifest["sites"].values():
        for found in entry["kmeans"].values():
            assert found["error"] <= found["faiss_error"]


def test_same_seed_same_bytes_and_another_seed_others(chain: Chain, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(chain.model)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        calibrate(checkpoint, tmp_path / name, CalibrationSettings(samples=2, seqlen=64, seed=seed))
    read = {name: (tmp_path / name / "calibration.safetensors").read_bytes() for name in "abc"}
    assert read["a"] == read["b"] != read["c"]
    assert (tmp_path / "a" / "calibration.json").read_bytes() == (tmp_path / "b" / "calibration.json").read_bytes()


def test_global_random_state_is_left_alone(chain: Chain, tmp_path: Path) -> None:
    state = torch.random.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002 - that very state is meant
    calibrate(open_checkpoint(chain.model), tmp_path / "out", OPTIONS)
    assert torch.equal(torch.random.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]  # noqa: NPY002


def test_an_interrupted_run_resumes_to_the_same_bytes(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, options = open_checkpoint(chain.model), CalibrationSettings(samples=3, seqlen=64)
    calibrate(checkpoint, tmp_path / "whole", options)
    seen: list[int] = []

    def interrupted(*args):  # type: ignore[no-untyped-def]
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(1)
        return visit_sites(*args)

    monkeypatch.setattr("oasis_cli.calibration.stage.visit_sites", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(checkpoint, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    seen.clear()
    monkeypatch.setattr("oasis_cli.calibration.stage.visit_sites", lambda *args: seen.append(1) or visit_sites(*args))
    calibrate(checkpoint, tmp_path / "out", options, resume=True)
    assert len(seen) == 1  # two of the three sequences were done
    for name in ("calibration.safetensors", "calibration.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_resume_leaves_a_finished_calibration_and_refuses_another(chain: Chain, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(chain.model)
    first = calibrate(checkpoint, tmp_path / "out", OPTIONS)
    again = calibrate(checkpoint, tmp_path / "out", OPTIONS, resume=True)
    assert again.loss == first.loss
    assert again.seconds == 0
    with pytest.raises(InputError, match="was finished with samples=2 instead of 3; choose another --out, or delete"):
        calibrate(checkpoint, tmp_path / "out", CalibrationSettings(samples=3, seqlen=64), resume=True)


def test_a_text_shorter_than_a_window_says_how_many_tokens(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("not much to learn from\n")
    with pytest.raises(InputError, match=r"its \d+ tokens are fewer than the seqlen of 64"):
        calibrate(
            open_checkpoint(chain.model),
            tmp_path / "out",
            CalibrationSettings(dataset=str(tmp_path / "short.txt"), samples=1, seqlen=64),
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt"]


def test_a_quantized_model_is_refused(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="already quantized"):
        calibrate(open_checkpoint(chain.quantized), tmp_path / "out", OPTIONS)


def test_damage_is_found_on_reading(chain: Chain, tmp_path: Path) -> None:
    out = tmp_path / "out"
    calibrate(open_checkpoint(chain.model), out, OPTIONS)
    path = out / "calibration.safetensors"
    good = path.read_bytes()
    for bad in (good[:-1], good[: len(good) // 2], good[:-5] + b"\x01" + good[-4:], b""):
        path.write_bytes(bad)
        with pytest.raises(InputError, match="run oasis calibrate again"):
            read_calibration(out)
    path.write_bytes(good)
    manifest = json.loads((out / "calibration.json").read_text())
    for change in ({"schema_version": 99}, {"sites": {"x": {}}}, {"kind": "image"}, {"tensors_digest": "sha256:0"}):
        (out / "calibration.json").write_text(json.dumps(manifest | change))
        with pytest.raises(InputError):
            read_calibration(out)


def test_importance_of_errors_alone(chain: Chain, tmp_path: Path) -> None:
    """Every inlier weighs the square of its token's scale; centroids are the best for that, and other than Fisher's."""
    options = CalibrationSettings(samples=4, seqlen=128, importance="error")
    calibrate(open_checkpoint(chain.model), tmp_path / "c", options)
    name = "model.layers.1.self_attn.q_proj+k_proj+v_proj"
    site, fisher = (read_calibration(folder).sites[name] for folder in (tmp_path / "c", chain.calibration))
    scales: list[torch.Tensor] = []
    checkpoint = open_checkpoint(chain.model)
    windows = calibration_windows(load_text(None, "calibration"), checkpoint.load_tokenizer(), 4, 128, 0)
    model = checkpoint.load_model()
    sites = [each for each in find_sites(model) if each.name == name]
    for tokens in windows.tokens:
        visit_sites(model, sites, tokens[None], lambda _s, x, _g: scales.append(x.abs().amax(dim=1)), False)
    expected = (torch.cat(scales).double() ** 2).sum() * (128 - 2)  # K = 128 less an outlier a side
    assert site.points.weights.sum() == pytest.approx(float(expected), rel=1e-5)
    assert not torch.equal(site.centroids[4], fisher.centroids[4])
    assert torch.equal(site.thresholds, fisher.thresholds)
    values, weights = site.points.values, site.points.weights
    assert price(site.centroids[4].numpy(), values, weights) <= price(fisher.centroids[4].numpy(), values, weights)
