"""Weights to scales, codebooks and indices: one module a method, and the folder that they are written to."""

from oasis_cli.quantization.settings import METHODS, QuantizationSettings
from oasis_cli.quantization.stage import QuantizationResult, quantize

__all__ = ["METHODS", "QuantizationResult", "QuantizationSettings", "quantize"]
