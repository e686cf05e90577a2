"""The calibration folder: `calibration.safetensors` and `calibration.json` (kind `calibration`).

For every site S the tensors file holds

    S/centroids.B          float32 [2**B], ascending, for B = 1 to 4 bits: weighted K-Means of the inliers' x / s_t
    S/points, S/weights    float64 [n]: the weighted histogram that they were found on
    S/thresholds           float32 [2]: lower and upper static outlier threshold, in the units of x
    S/second_moments       float32 [K]: mean of x**2 of every input channel

beside

    tokens                 int32 [samples, seqlen]: the sequences themselves, for methods that pass them again

and the manifest says from which model, text and settings, with statistics of every site.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from oasis_cli.errors import InputError
from oasis_cli.formats.manifest import digest_file, read_sealed
from oasis_cli.numerics.histogram import Points
from oasis_cli.paths import user_path

KIND: Final = "calibration"
SCHEMA_VERSION: Final = 1
MANIFEST_NAME: Final = "calibration.json"
TENSORS_NAME: Final = "calibration.safetensors"
TOKENS: Final = "tokens"
BITS: Final = (1, 2, 3, 4)


@dataclass(frozen=True)
class SiteCalibration:
    """What calibration learnt of one site; shapes as the module says.

    Attributes:
        layers: names of the layers that the site feeds.
        centroids: by bits.
        points: the inliers' weighted histogram.
        thresholds: lower and upper.
        second_moments: of every input channel.
    """

    layers: tuple[str, ...]
    centroids: Mapping[int, Tensor]
    points: Points
    thresholds: Tensor
    second_moments: Tensor

    @property
    def K(self) -> int:
        """Input channels."""
        return self.second_moments.shape[0]


@dataclass(frozen=True)
class Calibration:
    """A calibration as read from its folder.

    Attributes:
        manifest: the whole of `calibration.json`.
        sites: by name, in the order of the manifest, which is the alphabet's.
        digest: SHA-256 of the tensors file.
        tokens: the sequences, int64 [samples, seqlen].
    """

    manifest: Mapping[str, Any]
    sites: Mapping[str, SiteCalibration]
    digest: str
    tokens: Tensor

    @property
    def model_digest(self) -> str:
        """Digest of the model that was calibrated."""
        return str(self.manifest["created_from"]["model"])

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The settings that calibration ran with."""
        recipe: Mapping[str, Any] = self.manifest["recipe"]
        return recipe


def site_tensors(name: str, site: SiteCalibration) -> dict[str, Tensor]:
    """A site's tensors under the names they have on disk."""
    return {
        **{f"{name}/centroids.{bits}": centroids.float() for bits, centroids in site.centroids.items()},
        f"{name}/points": torch.from_numpy(site.points.values),
        f"{name}/weights": torch.from_numpy(site.points.weights),
        f"{name}/thresholds": site.thresholds.float(),
        f"{name}/second_moments": site.second_moments.float(),
    }


def read_calibration(folder: str | Path) -> Calibration:
    """Read and check a calibration folder.

    Raises:
        InputError: not a calibration, of a newer version, or damaged.
    """
    folder = user_path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder; run oasis calibrate first and name its --out")
    manifest = read_sealed(folder / MANIFEST_NAME, KIND, SCHEMA_VERSION)
    path = folder / TENSORS_NAME
    again = "run oasis calibrate again"
    if not path.is_file():
        raise InputError(f"{path}: not found; {again}")
    digest = digest_file(path)
    if digest != manifest.get("tensors_digest"):
        raise InputError(f"{path}: damaged, its digest is not the one in {MANIFEST_NAME}; {again}")
    try:
        tensors = load_file(path)
        sites = {name: _read_site(name, entry, tensors) for name, entry in manifest["sites"].items()}
        manifest["created_from"]["model"], manifest["recipe"]["outlier_fraction"]
        if TOKENS not in tensors:
            raise InputError(f"{folder}: made by an earlier version of oasis, which kept no tokens; {again}")
        tokens = tensors[TOKENS].long()
    except (SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: damaged ({error}); {again}") from None
    return Calibration(manifest, sites, digest, tokens)


def _read_site(name: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SiteCalibration:
    points = Points(tensors[f"{name}/points"].double().numpy(), tensors[f"{name}/weights"].double().numpy())
    return SiteCalibration(
        layers=tuple(entry["layers"]),
        centroids={bits: tensors[f"{name}/centroids.{bits}"] for bits in BITS},
        points=points,
        thresholds=tensors[f"{name}/thresholds"],
        second_moments=tensors[f"{name}/second_moments"],
    )
