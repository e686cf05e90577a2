"""What most tests stand on: the toy model taken through the chain once a session."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from oasis_cli.cli.group import oasis
from oasis_cli.tiny import tiny_model_folder

# a shell lets what it runs in the background ignore SIGINT, and so would the processes that tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # for tiny matrices, threads only wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The real model first: it keeps one core for as long as all the rest keeps the others."""
    items.sort(key=lambda item: item.get_closest_marker("real_model") is None)


def run_cli(*args: object) -> Result:
    """Run `oasis` as the command line would; standard output and error are kept apart."""
    return CliRunner().invoke(oasis, [str(arg) for arg in args], prog_name="oasis")


@pytest.fixture
def cli() -> Callable[..., Result]:
    """Runs a command."""
    return run_cli


@dataclass(frozen=True)
class Chain:
    """The toy model and its artifacts; not to be changed."""

    model: Path
    calibration: Path
    quantized: Path
    image: Path


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Calibrated on four sequences of 128 tokens, W4A4."""
    folder = tmp_path_factory.mktemp("chain")
    found = Chain(tiny_model_folder(), folder / "calibration", folder / "quantized", folder / "image")
    for args in (
        ("calibrate", found.model, "--out", found.calibration, "--samples", 4, "--seqlen", 128),
        ("quantize", found.model, "--calibration", found.calibration, "--method", "oasis", "--out", found.quantized),
        ("compile", found.quantized, "--out", found.image),
    ):
        result = run_cli(*args)
        assert result.exit_code == 0, result.stderr
    return found


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder that OASIS_DATA names: real models and evaluation data that are no part of the product."""
    folder = os.environ.get("OASIS_DATA")
    if not folder:
        pytest.skip("OASIS_DATA is not set: it names a folder with real models and evaluation data")
    return Path(folder)
