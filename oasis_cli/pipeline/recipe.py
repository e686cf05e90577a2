"""Recipes: the settings of all five stages in one YAML file, checked whole before anything runs."""

import difflib
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from pydantic.dataclasses import dataclass as settings

from oasis_cli.calibration import CalibrationSettings
from oasis_cli.config import STRICT, from_mapping, parse_yaml, read_text
from oasis_cli.errors import InputError
from oasis_cli.paths import user_path
from oasis_cli.pipeline.settings import CompileSettings, EvaluationSettings, SimulationSettings
from oasis_cli.quantization import QuantizationSettings

_SHIPPED: Final = (
    Path(__file__).parents[1] / "recipes",  # inside the wheel
    Path(__file__).parents[2] / "recipes",  # in a checkout
)


@settings(frozen=True, config=STRICT)
class Recipe:
    """One run of the whole chain.

    Attributes:
        model: folder, GGUF file or hub id; None where the command line names it.
        out: folder for all artifacts; None where the command line names it.
        calibrate, quantize, compile, simulate, eval: settings of the stages.
    """

    model: str | None = None
    out: str | None = None
    calibrate: CalibrationSettings = field(default_factory=CalibrationSettings)
    quantize: QuantizationSettings = field(default_factory=QuantizationSettings)
    compile: CompileSettings = field(default_factory=CompileSettings)
    simulate: SimulationSettings = field(default_factory=SimulationSettings)
    eval: EvaluationSettings = field(default_factory=EvaluationSettings)


def shipped_recipes() -> dict[str, Path]:
    """Recipes that come with the tool, by name."""
    folder = next((folder for folder in _SHIPPED if folder.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def find_recipe(name: str) -> Path:
    """The file of a recipe given by path or by the name of a shipped one.

    Raises:
        InputError: neither; the nearest shipped name is suggested.
    """
    shipped = shipped_recipes()
    path = user_path(name)
    try:
        if path.is_file():
            return path
    except OSError as error:  # too long a name, or a folder on the way that may not be searched
        raise InputError(f"{name}: cannot be read ({error.strerror}); check the path") from error
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InputError(f"{name}: no such recipe file, and not a shipped one ({', '.join(shipped)}){hint or '; name one'}")


def load_recipe(path: Path, changes: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe, with `key.path=value` changes laid over it.

    Raises:
        InputError: every unknown or impossible key with its line, or a change that is not `key=value`.
    """
    data, lines = parse_yaml(read_text(path), str(path))
    recipe = from_mapping(data, Recipe, str(path), lines)
    for change in changes:  # one at a time, so that a message names the one to blame
        _apply(data, change)
        recipe = from_mapping(data, Recipe, f"--set {change}")
    return recipe


def _apply(data: dict[str, Any], change: str) -> None:
    key, equals, value = change.partition("=")
    if not equals or not key:
        raise InputError(f"--set {change}: expected key=value, as in quantize.act_bits=3")
    parsed, _ = parse_yaml(value or "null", f"--set {change}")
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise InputError(f"--set {change}: {parent} holds a value, not keys; leave out what follows it")
    data[last] = parsed


def stage_settings(path: Path | None) -> Recipe:
    """A recipe for a single stage: the one at `path`, or all defaults."""
    return Recipe() if path is None else load_recipe(find_recipe(str(path)))
