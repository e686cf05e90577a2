"""The builder of small quantized folders lies with the compiler's tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    name = "quantized_folder_for_tests"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "compiler" / "quantized_folder.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny products: waiting for a second thread would cost more than it brings."""
    torch.set_num_threads(1)
