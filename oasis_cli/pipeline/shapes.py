"""Timing of a model by its sizes alone: no weights, no tensor library, an answer at once."""

from pathlib import Path

from oasis_cli.compiler.program import build_program
from oasis_cli.formats.program import ModelShape
from oasis_cli.hardware.shapes import load_shape
from oasis_cli.hardware.target import Target, load_target
from oasis_cli.pipeline.settings import SimulationSettings
from oasis_cli.simulator.report import SimulationReport
from oasis_cli.simulator.timing import simulate


def simulate_shape(
    shape: ModelShape | str | Path,
    options: SimulationSettings,
    target: Target | str | Path = "oasis-28nm",
    *,
    weight_bits: int = 4,
    act_bits: int = 4,
    outlier_fraction: float = 0.005,
) -> SimulationReport:
    """Time a model of which only the sizes are known.

    Args:
        shape: sizes, a shipped shape's name, or a YAML file.
        options: batch and lengths.
        target: accelerator, itself or by name or file.
        weight_bits: n_W.
        act_bits: n_A.
        outlier_fraction: outliers a side.

    Raises:
        InputError: no such shape or target, lengths beyond the model's positions, or a target that cannot hold it.
    """
    sizes = load_shape(shape) if isinstance(shape, str | Path) else shape
    chip = load_target(target) if isinstance(target, str | Path) else target
    program = build_program(sizes, weight_bits, act_bits, outlier_fraction)
    decode = options.decode_within(sizes.max_positions)
    return simulate(program, sizes, chip, options.batch, options.prefill, decode)
