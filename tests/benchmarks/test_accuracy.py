"""The benchmark's file grows window by window, is never computed twice, and mixes nothing."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from oasis_cli import CalibrationSettings, QuantizationSettings
from oasis_cli.pipeline.evaluating import evaluate
from oasis_cli.pipeline.settings import EvaluationSettings
from tests.conftest import Chain

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accuracy.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="benchmarks are not here: this looks at a checkout")


def run(results: Path, chain: Chain, *options: object, status: int = 0) -> str:
    command = [results, "--original", chain.model, "--text", "embedded", "--seqlen", 64, *options]
    done = CliRunner().invoke(runpy.run_path(str(SCRIPT))["main"], list(map(str, command)))
    assert done.exit_code == status, done.output
    return done.output


def test_it_grows_and_agrees_with_eval(chain: Chain, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    run(results, chain, "--windows", 1, f"oasis={chain.quantized}")
    first = results.read_text()
    table = run(results, chain, "--windows", 3, f"oasis={chain.quantized}")
    assert results.read_text().startswith(first)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["name"], row["window"]) for row in rows] == [
        (name, window) for window in range(3) for name in ("original", "oasis")
    ]
    found = evaluate(chain.quantized, EvaluationSettings(seqlen=64, limit=3), against=chain.model).perplexities[0]
    own = [row for row in rows if row["name"] == "oasis"]
    assert [row["nll"] for row in own] == pytest.approx(list(found.window_nll), rel=1e-6)
    assert found.against is not None
    assert sum(row["kl_mean"] for row in own) / 3 == pytest.approx(found.against.kl_mean, rel=1e-5)
    assert f"| oasis | 3 | {found.value:.2f} ± " in table
    untouched = results.read_text()
    run(results, chain, "--windows", 3, f"oasis={chain.quantized}")
    assert results.read_text() == untouched


def test_another_model_under_the_same_name_is_refused(chain: Chain, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    run(results, chain, "--windows", 1, f"oasis={chain.quantized}")
    said = run(results, chain, "--windows", 2, f"oasis={chain.model}", status=1)
    assert "the file has it with another model" in said


def test_the_table_by_hand(tmp_path: Path) -> None:
    """Losses e² - e and e³ - e in one window, so a ratio of 2.72 / 4.67; no error without a second window."""
    results = tmp_path / "results.jsonl"
    rows = [
        {"name": name, "window": 0, "nll": nll, "reference_nll": 1.0, "kl_mean": kl, "kl_max": 1.0, "agreement": 0.5}
        for name, nll, kl in (("original", 1.0, 0.0), ("oasis", 3.0, 0.5), ("better", 2.0, 0.25))
    ]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run([sys.executable, SCRIPT, str(results), "--table"], capture_output=True, text=True, check=True)
    ratio = (math.e**2 - math.e) / (math.e**3 - math.e)
    assert f"| better | 1 | 7.39 ± nan | {ratio:.3f} ± nan | 0.2500 | 50.0% |" in done.stdout


def test_variants_are_made_once_and_measured(chain: Chain, tmp_path: Path) -> None:
    """The importance group: four models of two calibrations, one of them shared with the paper's."""
    script = runpy.run_path(str(SCRIPT.with_name("variants.py")))
    command = [tmp_path / "r.jsonl", "--original", chain.model, "--calibrate-on", "embedded", "--text", "embedded"]
    command += ["--work", tmp_path / "work", "--group", "importance", "--windows", 1, "--seqlen", 64, "--samples", 2]
    done = CliRunner().invoke(script["main"], list(map(str, command)))
    assert done.exit_code == 0, (done.output, done.exception)
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    names = ["oasis W4A4, fisher", "oasis W4A4, error", "oasis W4A3, fisher", "oasis W4A3, error"]
    assert [row["name"] for row in rows] == ["original", "oasis", *names]
    nll = {row["name"]: row["nll"] for row in rows}
    assert nll["oasis"] == nll["oasis W4A4, fisher"] != nll["oasis W4A4, error"]
    assert len(list((tmp_path / "work" / "calibrations").iterdir())) == 2
    assert len(list((tmp_path / "work" / "models").iterdir())) == 4


@pytest.mark.parametrize("group", ["methods", "ingredients", "outliers", "calibration", "importance", "bits"])
def test_every_variant_has_possible_settings_and_a_name_of_its_own(group: str) -> None:
    script = runpy.run_path(str(SCRIPT.with_name("variants.py")))
    found = list(script["variants"](group))
    for variant in found:
        CalibrationSettings(**variant.calibrate)
        QuantizationSettings(**variant.quantize)
    assert len({variant.name for variant in found}) == len(found)
