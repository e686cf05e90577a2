"""The builder of small quantized folders, as a fixture."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_builder() -> ModuleType:
    """`quantized_folder.py` beside this file; test modules of another folder cannot import it by name."""
    name = "quantized_folder_for_tests"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("quantized_folder.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    return load_builder()
