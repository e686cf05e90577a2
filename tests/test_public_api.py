"""The package as a notebook uses it: names that can be listed, and paths as text."""

import subprocess
import sys
from pathlib import Path

import pytest

import oasis_cli
from oasis_cli import CalibrationSettings, EvaluationSettings, QuantizationSettings, SimulationSettings
from tests.conftest import Chain


def test_public_names_are_listed_before_their_first_use() -> None:
    code = "import sys, oasis_cli; print(set(oasis_cli.__all__) <= set(dir(oasis_cli)), 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["True", "False"]


def test_the_chain_with_paths_as_text(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `Path` they are used everywhere else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint = oasis_cli.open_checkpoint(str(chain.model))
    oasis_cli.calibrate(checkpoint, "calibration", CalibrationSettings(samples=1, seqlen=64))
    assert oasis_cli.read_calibration("calibration").recipe["samples"] == 1
    quantized = oasis_cli.quantize(checkpoint, "~/quantized", "~/calibration", QuantizationSettings(method="oasis"))
    assert quantized.folder == tmp_path / "quantized"
    compiled = oasis_cli.compile_model("quantized", "image", "oasis-28nm")
    assert compiled.image == Path("image/model.oimg")
    oasis_cli.load("quantized")
    oasis_cli.open_image("~/image")
    report, _ = oasis_cli.simulate_image("image", SimulationSettings(decode=4))
    assert report.decode == 4
    oasis_cli.run_functional("image", seqlen=8, reference="quantized", engine="gathered")
    oasis_cli.evaluate("image", EvaluationSettings(seqlen=8, limit=1))
