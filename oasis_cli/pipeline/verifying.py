"""The verify stage: is an artifact whole and sound, and is it what it says it came from?"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oasis_cli.compiler.verify import verify_image
from oasis_cli.errors import CheckError, InputError
from oasis_cli.formats.baseline import BASELINE_KIND, BASELINE_SCHEMA_VERSION
from oasis_cli.formats.calibration import read_calibration
from oasis_cli.formats.manifest import read_sealed
from oasis_cli.formats.quantized import KIND, REPORT_NAME, SCHEMA_VERSION
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.paths import user_path
from oasis_cli.pipeline.artifacts import Kind, kind_of
from oasis_cli.progress import SILENT, Progress
from oasis_cli.runtime.verification import verify_baseline, verify_quantized


@dataclass(frozen=True)
class Verification:
    """An artifact that was found sound.

    Attributes:
        path: what was checked.
        kind: what it is.
        checked: what was looked at, a phrase each.
    """

    path: str
    kind: str
    checked: tuple[str, ...]


def verify(path: str | Path, against: str | Path | None = None, progress: Progress = SILENT) -> Verification:
    """Check any artifact.

    Args:
        path: a model, a calibration, a quantized folder or an image.
        against: what the artifact came from: for an image the quantized folder, for a quantized folder or a
            calibration the model.
        progress: who is told.

    Raises:
        InputError: there is nothing at `path` or at `against`.
        CheckError: something is damaged, or does not belong to `against`.
    """
    path, against = user_path(path), user_path(against) if against is not None else None
    for place in (path, *([against] if against else [])):
        if not os.path.lexists(place):
            raise InputError(f"{place}: not found; name a folder or a file")
    try:
        kind = kind_of(path)
        checked = _CHECKS[kind](path, progress)
    except InputError as error:  # whatever a reader refuses is what verify is asked to find
        raise CheckError(str(error)) from error
    if against is not None:  # what cannot be read from now on is `against`, which nobody asked to check
        checked.append(_ORIGINS[kind](path, against, progress))
    return Verification(str(path), kind.value, tuple(checked))


def _check_model(path: Path, progress: Progress) -> list[str]:
    model = open_checkpoint(path).load_model(progress=progress)
    return [f"{len(model.state_dict())} tensors: all there, of the right shape, finite"]


def _check_calibration(path: Path, progress: Progress) -> list[str]:
    calibration = read_calibration(path)
    return [f"tensors of {len(calibration.sites)} sites: digest as in the manifest"]


def _check_image(path: Path, progress: Progress) -> list[str]:
    found = verify_image(path, progress=progress)
    return [f"{found.file_bytes:,} bytes in {found.sections} sections: every checksum holds"]


def _no_origin(path: Path, against: Path, progress: Progress) -> str:
    raise InputError(f"{path}: a model comes from no other artifact; leave out --against {against}")


def _calibration_origin(path: Path, against: Path, progress: Progress) -> str:
    return _model_origin(path, read_calibration(path).model_digest, against)


def _quantized_origin(path: Path, against: Path, progress: Progress) -> str:
    report = read_sealed(path / REPORT_NAME, KIND, SCHEMA_VERSION)
    return _model_origin(path, report["created_from"].get("model"), against)


def _baseline_origin(path: Path, against: Path, progress: Progress) -> str:
    report = read_sealed(path / REPORT_NAME, BASELINE_KIND, BASELINE_SCHEMA_VERSION)
    return _model_origin(path, report["created_from"].get("model"), against)


def _model_origin(path: Path, digest: object, against: Path) -> str:
    if open_checkpoint(against).digest != digest:
        raise CheckError(f"{path}: was made from another model than {against}")
    return f"made from {against}"


def _image_origin(path: Path, against: Path, progress: Progress) -> str:
    found = verify_image(path, against, progress)
    return f"{found.layers} layers: indices and tables equal those of {against}"


_CHECKS: Final[dict[Kind, Callable[[Path, Progress], list[str]]]] = {
    Kind.MODEL: _check_model,
    Kind.CALIBRATION: _check_calibration,
    Kind.QUANTIZED: verify_quantized,
    Kind.BASELINE: verify_baseline,
    Kind.IMAGE: _check_image,
}
_ORIGINS: Final[dict[Kind, Callable[[Path, Path, Progress], str]]] = {
    Kind.MODEL: _no_origin,
    Kind.CALIBRATION: _calibration_origin,
    Kind.QUANTIZED: _quantized_origin,
    Kind.BASELINE: _baseline_origin,
    Kind.IMAGE: _image_origin,
}
