"""The verify stage: is an artifact whole and sound, and is it what it says it came from?"""

from dataclasses import dataclass
from pathlib import Path

from oasis_cli.compiler.verify import verify_image
from oasis_cli.errors import CheckError, InputError
from oasis_cli.formats.calibration import read_calibration
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.pipeline.artifacts import Kind, kind_of
from oasis_cli.progress import SILENT, Progress
from oasis_cli.runtime.verification import verify_quantized


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


def verify(path: Path, against: Path | None = None, progress: Progress = SILENT) -> Verification:
    """Check any artifact.

    Args:
        path: a model, a calibration, a quantized folder or an image.
        against: for an image the quantized folder that it was compiled from; for a calibration the model it is of.
        progress: who is told.

    Raises:
        InputError: there is nothing at `path`.
        CheckError: something is damaged, or does not belong to `against`.
    """
    if not path.exists():
        raise InputError(f"{path}: not found; name a folder or a file")
    try:
        kind = kind_of(path)
        checked = _CHECKS[kind](path, against, progress)
    except InputError as error:  # whatever a reader refuses is what verify is asked to find
        raise CheckError(str(error)) from error
    return Verification(str(path), kind.value, tuple(checked))


def _check_model(path: Path, against: Path | None, progress: Progress) -> list[str]:
    _no_reference(path, against)
    model = open_checkpoint(path).load_model(progress=progress)
    return [f"{len(model.state_dict())} tensors: all there, of the right shape, finite"]


def _check_calibration(path: Path, against: Path | None, progress: Progress) -> list[str]:
    calibration = read_calibration(path)
    checked = [f"tensors of {len(calibration.sites)} sites: digest as in the manifest"]
    if against is not None:
        if open_checkpoint(against).digest != calibration.model_digest:
            raise CheckError(f"{path}: was made for another model than {against}")
        checked.append(f"made for {against}")
    return checked


def _check_quantized(path: Path, against: Path | None, progress: Progress) -> list[str]:
    _no_reference(path, against)
    return verify_quantized(path, progress)


def _check_image(path: Path, against: Path | None, progress: Progress) -> list[str]:
    found = verify_image(path, against, progress)
    checked = [f"{found.file_bytes:,} bytes in {found.sections} sections: every checksum holds"]
    if against is not None:
        checked.append(f"{found.layers} layers: indices and tables equal those of {against}")
    return checked


def _no_reference(path: Path, against: Path | None) -> None:
    if against is not None:
        raise InputError(f"{path}: --against is for images and calibrations")


_CHECKS = {
    Kind.MODEL: _check_model,
    Kind.CALIBRATION: _check_calibration,
    Kind.QUANTIZED: _check_quantized,
    Kind.IMAGE: _check_image,
}
