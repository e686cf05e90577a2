"""Non-uniform 4-bit weights and activations for language models, and the LUT-GEMM accelerator that runs them.

Importing this registers the `oasis` quantization method with transformers; torch is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from oasis_cli.runtime.registration import register_with_transformers
from oasis_cli.version import __version__

if TYPE_CHECKING:
    from oasis_cli.calibration import CalibrationSettings, calibrate
    from oasis_cli.compiler.compile import compile_model
    from oasis_cli.formats.calibration import read_calibration
    from oasis_cli.formats.image import open_image
    from oasis_cli.hardware.shapes import load_shape
    from oasis_cli.hardware.target import load_target
    from oasis_cli.models.checkpoint import open_checkpoint
    from oasis_cli.pipeline.evaluating import evaluate
    from oasis_cli.pipeline.settings import EvaluationSettings, SimulationSettings
    from oasis_cli.pipeline.shapes import simulate_shape
    from oasis_cli.pipeline.simulating import run_functional, simulate_image
    from oasis_cli.quantization import QuantizationSettings, quantize
    from oasis_cli.runtime.loading import load
    from oasis_cli.tiny import tiny_model_folder

_HOMES: Final = {
    "CalibrationSettings": "calibration",
    "EvaluationSettings": "pipeline.settings",
    "QuantizationSettings": "quantization",
    "SimulationSettings": "pipeline.settings",
    "calibrate": "calibration",
    "compile_model": "compiler.compile",
    "evaluate": "pipeline.evaluating",
    "load": "runtime.loading",
    "load_shape": "hardware.shapes",
    "load_target": "hardware.target",
    "open_checkpoint": "models.checkpoint",
    "open_image": "formats.image",
    "quantize": "quantization",
    "read_calibration": "formats.calibration",
    "run_functional": "pipeline.simulating",
    "simulate_image": "pipeline.simulating",
    "simulate_shape": "pipeline.shapes",
    "tiny_model_folder": "tiny",
}

__all__ = [
    "CalibrationSettings",
    "EvaluationSettings",
    "QuantizationSettings",
    "SimulationSettings",
    "__version__",
    "calibrate",
    "compile_model",
    "evaluate",
    "load",
    "load_shape",
    "load_target",
    "open_checkpoint",
    "open_image",
    "quantize",
    "read_calibration",
    "run_functional",
    "simulate_image",
    "simulate_shape",
    "tiny_model_folder",
]

register_with_transformers()


def __getattr__(name: str) -> Any:
    """Public names on first use, so that `import oasis_cli` is quick."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Public names are listed, and completed in a notebook, before their first use."""
    return sorted({*globals(), *__all__})
