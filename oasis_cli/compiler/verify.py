"""`oasis verify` for images: is every bit as it was compiled, and does the image hold the model it came from?"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from oasis_cli.compiler.layer import packed_rows
from oasis_cli.compiler.plan import ImagePlan, plan_image
from oasis_cli.compiler.source import QuantizedFolder, open_quantized
from oasis_cli.errors import CheckError
from oasis_cli.formats.image import METADATA_SECTION, Image, SectionDraft, check_folder, open_image
from oasis_cli.formats.image_table import Section, SectionKind
from oasis_cli.formats.packing import unpack_indices
from oasis_cli.formats.program import Opcode
from oasis_cli.formats.weight_order import channel_order
from oasis_cli.paths import user_path
from oasis_cli.progress import SILENT, Progress


@dataclass(frozen=True)
class ImageCheck:
    """What was found sound.

    Attributes:
        path: the image.
        file_bytes: its size; every byte was checked.
        sections: checksums compared.
        layers: layers whose weight indices were compared with the quantized folder's.
    """

    path: Path
    file_bytes: int
    sections: int
    layers: int


def verify_image(path: str | Path, against: str | Path | None = None, progress: Progress = SILENT) -> ImageCheck:
    """Check an image.

    Args:
        path: a compiled folder, or a `model.oimg` alone (then nothing beside it is looked at).
        against: the quantized folder that it was compiled from: everything but the program's target is compared.
        progress: told of every section.

    Raises:
        InputError: the image or a file beside it is damaged, or `against` is no sound quantized folder.
        CheckError: the image holds another model than `against`.
    """
    path = user_path(path)
    image = open_image(path, verify=True, progress=progress)
    image.metadata()
    image.program()
    if path.is_dir():
        check_folder(image, path)
    layers = _compare(image, open_quantized(user_path(against)), progress) if against is not None else 0
    return ImageCheck(image.path, image.file_bytes, len(image.sections), layers)


def _compare(image: Image, source: QuantizedFolder, progress: Progress) -> int:
    metadata = image.metadata()
    plan = plan_image(source, metadata.target, metadata.files)
    if [_outline(draft) for draft in plan.drafts] != [_outline(section) for section in image.sections]:
        raise CheckError(f"{image.path}: was compiled from another model than {source.path}")
    with progress.task("comparing", len(plan.drafts), "sections") as task:
        for draft in plan.drafts:
            if not _same(image, source, draft, plan):
                raise CheckError(f"{image.path}: section {draft.name} differs from {source.path}; compile it again")
            task.advance()
    return _count_layers(plan)


def _outline(section: SectionDraft | Section) -> tuple[object, ...]:
    # the metadata's length follows the version of the tool
    return section.name, section.kind, section.dtype, section.shape if section.name != METADATA_SECTION else ()


def _same(image: Image, source: QuantizedFolder, draft: SectionDraft, plan: ImagePlan) -> bool:
    section = image.section(draft.name)
    if draft.kind is SectionKind.METADATA:  # the tool may have moved on, and config.json been written anew
        found = image.metadata()
        due = replace(plan.metadata, tool_version=found.tool_version, created_from=found.created_from)
        return found == due
    if draft.kind is SectionKind.INDICES:
        layer = draft.name.removesuffix(".indices")
        return _same_indices(image.array(section), source, layer, plan.metadata.target.pe_lines)
    return _same_bytes(draft.chunks(), image.array(section).reshape(-1).view(np.uint8))


def _same_indices(stream: npt.NDArray[np.uint8], source: QuantizedFolder, layer: str, lines: int) -> bool:
    """Unstream and unpack what the image holds, and compare index by index."""
    K = source.spec.layers[layer].in_features
    image_rows = torch.from_numpy(stream[channel_order(len(stream), lines)])
    source_rows = torch.from_numpy(packed_rows(source, layer))
    return torch.equal(unpack_indices(image_rows, K), unpack_indices(source_rows, K))


def _same_bytes(chunks: Iterable[bytes], found: npt.NDArray[np.uint8]) -> bool:
    position = 0
    for chunk in chunks:
        if found[position : position + len(chunk)].tobytes() != chunk:
            return False
        position += len(chunk)
    return position == len(found)


def _count_layers(plan: ImagePlan) -> int:
    return sum(op.opcode is Opcode.LUT_GEMM for op in plan.operations)
