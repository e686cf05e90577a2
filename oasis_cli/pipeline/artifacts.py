"""What a path is: a model, a calibration, a quantized model, an image or a recipe."""

from enum import Enum
from pathlib import Path

from oasis_cli.errors import InputError
from oasis_cli.formats.baseline import BASELINE_QUANT_METHOD
from oasis_cli.formats.calibration import MANIFEST_NAME
from oasis_cli.formats.manifest import read_json
from oasis_cli.formats.quantized import QUANT_METHOD
from oasis_cli.paths import user_path


class Kind(Enum):
    """Kinds of artifact."""

    MODEL = "model"
    CALIBRATION = "calibration"
    QUANTIZED = "quantized model"
    BASELINE = "model of a method to compare with"
    IMAGE = "image"


_BY_METHOD = {QUANT_METHOD: Kind.QUANTIZED, BASELINE_QUANT_METHOD: Kind.BASELINE}
IMAGE_NAME = "model.oimg"


def kind_of(path: str | Path) -> Kind:
    """Tell what a path, or else a hub id, names.

    Raises:
        InputError: a folder that is none of the kinds, or a path that cannot be looked at.
    """
    try:
        return _kind_of(user_path(path))
    except OSError as error:  # too long a name, or a folder on the way that may not be searched
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the path") from error


def _kind_of(place: Path) -> Kind:
    if place.suffix == ".oimg" or (place / IMAGE_NAME).is_file():
        return Kind.IMAGE
    if (place / MANIFEST_NAME).is_file():
        return Kind.CALIBRATION
    config = place / "config.json"
    if config.is_file():
        block = read_json(config).get("quantization_config")
        return _BY_METHOD.get(str(block.get("quant_method")), Kind.MODEL) if isinstance(block, dict) else Kind.MODEL
    weights = any(place.glob("*.gguf")) or any(place.glob("model*.safetensors"))
    if place.is_dir() and not weights and any(place.iterdir()):
        raise InputError(f"{place}: neither a model, a calibration, a quantized model nor an image; name one of these")
    return Kind.MODEL


def image_file(path: str | Path) -> Path:
    """The image's file, given it or its folder."""
    place = user_path(path)
    return place if place.suffix == ".oimg" else place / IMAGE_NAME
