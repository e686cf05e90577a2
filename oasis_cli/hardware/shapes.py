"""Sizes of public models, enough to plan and time them without their weights."""

from dataclasses import fields
from pathlib import Path

from pydantic.dataclasses import dataclass

from oasis_cli.config import STRICT, load_yaml
from oasis_cli.formats.program import ModelShape
from oasis_cli.hardware.shipped import find_file, shipped_names

_FOLDER = Path(__file__).parent / "shapes"


@dataclass(frozen=True, config=STRICT)
class _ShapeFile(ModelShape):
    """A shape as a file holds it: the sizes and where they come from."""

    source: str = ""


def shape_names() -> tuple[str, ...]:
    """Names of the shipped shapes."""
    return shipped_names(_FOLDER)


def load_shape(name: str | Path) -> ModelShape:
    """The model shape called `name`, or described by the YAML file at that path.

    Raises:
        InputError: nothing of that name, or a file that describes no possible model.
    """
    read = load_yaml(find_file(name, _FOLDER, "model shape"), _ShapeFile)
    return ModelShape(**{field.name: getattr(read, field.name) for field in fields(ModelShape)})
