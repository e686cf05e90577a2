"""Tokens through the model: Fisher weights, activation codebooks, static thresholds, second moments (§III-A, §V-A)."""

from oasis_cli.calibration.stage import CalibrationResult, CalibrationSettings, calibrate

__all__ = ["CalibrationResult", "CalibrationSettings", "calibrate"]
