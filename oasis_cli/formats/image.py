"""`model.oimg`, the memory image of a compiled model: written streamed and deterministic, read with distrust.

docs/image-format.md holds the layout. `image.json` beside it is the same map for people and other tools.
"""

import hashlib
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from oasis_cli.errors import InputError
from oasis_cli.formats import image_table as table
from oasis_cli.formats.atomic import atomic_file
from oasis_cli.formats.image_metadata import ImageMetadata, decode_metadata
from oasis_cli.formats.image_program import check_program
from oasis_cli.formats.image_table import CURE, Section, SectionKind, SectionType
from oasis_cli.formats.manifest import digest_file, is_as_written, manifest, read_manifest
from oasis_cli.formats.program import NO_SECTION, RULES, Operation, decode_program
from oasis_cli.paths import user_path
from oasis_cli.progress import SILENT, Progress

IMAGE_NAME: Final = "model.oimg"
MAP_NAME: Final = "image.json"
PROGRAM_SECTION: Final = "program"
METADATA_SECTION: Final = "metadata"
KIND: Final = "image"
SCHEMA_VERSION: Final = 1
_CHUNK: Final = 1 << 22
# NumPy knows no bfloat16: such a section is read as its bits
_NUMPY: Final[dict[SectionType, np.dtype[Any]]] = {
    SectionType.U8: np.dtype("u1"),
    SectionType.I16: np.dtype("<i2"),
    SectionType.F16: np.dtype("<f2"),
    SectionType.BF16: np.dtype("<u2"),
    SectionType.F32: np.dtype("<f4"),
}


@dataclass(frozen=True)
class SectionDraft:
    """A section before it is written: declared first, its bytes made only when their turn comes.

    Attributes:
        name: unique in the image.
        kind: what it is for.
        dtype: type of its elements.
        shape: one to four positive dimensions.
        chunks: yields the bytes in order, little-endian, in pieces of any size; called once for each write.
    """

    name: str
    kind: SectionKind
    dtype: SectionType
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes]]


def write_image(path: Path, drafts: Sequence[SectionDraft], progress: Progress = SILENT) -> tuple[Section, ...]:
    """Write an image: the same drafts give the same bytes, and a failed write leaves nothing behind.

    Args:
        path: the file to write.
        drafts: the sections in the order in which they are to lie.
        progress: told of every section written.

    Returns:
        The sections as they lie in the file.

    Raises:
        InputError: the file cannot be written (disk full, no permission).
        ValueError: names repeat, or a draft yields another number of bytes than it declares.
    """
    if len({draft.name for draft in drafts}) != len(drafts):
        raise ValueError("section names repeat")
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(bytes(table.data_start(len(drafts))))
        sections = []
        with progress.task("writing the image", len(drafts), "sections") as task:
            for draft in drafts:
                sections.append(_write_section(file, draft))
                task.advance()
        file.seek(0)
        file.write(table.encode_head(sections))
    return tuple(sections)


def _write_section(file: BinaryIO, draft: SectionDraft) -> Section:
    offset = file.tell()
    digest = hashlib.sha256()
    for chunk in draft.chunks():
        digest.update(chunk)
        file.write(chunk)
    section = Section(draft.name, draft.kind, draft.dtype, draft.shape, offset, digest.digest())
    written = file.tell() - offset
    if written != section.length:
        raise ValueError(f"section {draft.name} yielded {written:,} bytes, it declared {section.length:,}")
    file.write(bytes(table.align(section.end) - section.end))
    return section


class Image:
    """An open image. Its arrays are views of the mapped file: private, so that writing to them changes no file."""

    def __init__(self, path: Path, sections: tuple[Section, ...], data: mmap.mmap) -> None:
        self.path = path
        self.sections = sections
        self._data = data
        self._by_name = {section.name: section for section in sections}

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return table.align(self.sections[-1].end)

    def section(self, name: str) -> Section:
        """The section of that name.

        Raises:
            InputError: the image has none.
        """
        if name not in self._by_name:
            raise InputError(f"{self.path}: has no section {name}; {CURE}")
        return self._by_name[name]

    def array(self, section: Section) -> npt.NDArray[Any]:
        """A section's elements in its shape [...] and type, a view of the file; a BF16 section as its bits, uint16."""
        count = math.prod(section.shape)
        flat = np.frombuffer(self._data, _NUMPY[section.dtype], count, section.offset)
        return flat.reshape(section.shape)

    def raw(self, section: Section) -> bytes:
        """A copy of a section's bytes."""
        return self._data[section.offset : section.end]

    def program(self) -> tuple[Operation, ...]:
        """The operations, checked against the section table and each other.

        Raises:
            InputError: an operation is damaged, or refers to what is not there.
        """
        operations = decode_program(self.raw(self.section(PROGRAM_SECTION)), str(self.path))
        check_program(operations, self.sections, str(self.path))
        return operations

    def metadata(self) -> ImageMetadata:
        """What the image says in words.

        Raises:
            InputError: the section is damaged.
        """
        return decode_metadata(self.raw(self.section(METADATA_SECTION)), str(self.path))

    def check(self, progress: Progress = SILENT) -> None:
        """Compare every byte after the table with its checksum, and the padding with zero.

        Raises:
            InputError: naming the first section that is damaged.
        """
        end = table.HEADER_BYTES + len(self.sections) * table.ENTRY_BYTES
        with progress.task("checking the image", len(self.sections), "sections") as task:
            for section in self.sections:
                self._check_zero(end, section.offset)
                if self._digest(section) != section.checksum:
                    raise InputError(f"{self.path}: section {section.name} is damaged (checksum); {CURE}")
                end = section.end
                task.advance()
        self._check_zero(end, len(self._data))

    def _digest(self, section: Section) -> bytes:
        digest = hashlib.sha256()
        for start in range(section.offset, section.end, _CHUNK):
            digest.update(self._data[start : min(start + _CHUNK, section.end)])
        return digest.digest()

    def _check_zero(self, start: int, end: int) -> None:
        if any(self._data[start:end]):
            raise InputError(f"{self.path}: the padding at byte {start:,} is not zero; {CURE}")


def find_image(path: str | Path) -> Path:
    """The image file that `path` means: itself, or the one inside a compiled folder."""
    place = user_path(path)
    return place / IMAGE_NAME if place.is_dir() else place


def open_image(path: str | Path, verify: bool = False, progress: Progress = SILENT) -> Image:
    """Open an image: size, magic, version, length and table are checked before anything is allocated.

    Args:
        path: a `model.oimg`, or the folder that holds one.
        verify: also compare every section with its checksum; anything that computes with the image should.
        progress: told of every section checked.

    Raises:
        InputError: missing, unreadable, not an image, a newer version, truncated or damaged.
    """
    path = find_image(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = table.decode_header(file.read(table.HEADER_BYTES), size, str(path))
            file.seek(0)
            sections = table.decode_table(file.read(header.head_bytes), header, str(path))
            data = mmap.mmap(file.fileno(), header.file_bytes, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise InputError(f"{path}: not found; run oasis compile to write it") from None
    except (OSError, ValueError) as error:  # mmap: ValueError where the file shrank meanwhile
        raise InputError(f"{path}: cannot be read ({error}); check that it is a file and its permissions") from error
    image = Image(path, sections, data)
    if verify:
        image.check(progress)
    return image


def describe_image(image: Image) -> dict[str, Any]:
    """The contents of `image.json`: everything follows from the binary, so that the two can be compared."""
    metadata = image.metadata()
    recipe = {"quantization": asdict(metadata.quantization), "target": asdict(metadata.target)}
    opening = manifest(KIND, SCHEMA_VERSION, metadata.created_from, recipe)
    return opening | {
        "tool_version": metadata.tool_version,
        "file": {"name": IMAGE_NAME, "bytes": image.file_bytes, "version": table.VERSION},
        "model": {"architecture": metadata.architecture} | asdict(metadata.shape),
        "files": metadata.files,
        "sections": [_describe_section(section) for section in image.sections],
        "program": [_describe_operation(operation, image.sections) for operation in image.program()],
    }


def _describe_section(section: Section) -> dict[str, Any]:
    return {
        "name": section.name,
        "kind": section.kind.name.lower(),
        "dtype": section.dtype.name.lower(),
        "shape": list(section.shape),
        "offset": section.offset,
        "length": section.length,
        "checksum": "sha256:" + section.checksum.hex(),
    }


def _describe_operation(operation: Operation, sections: Sequence[Section]) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(operation).items() if value not in ("", (), 0, 0.0, False)}
    roles = zip(RULES[operation.opcode].sections, operation.sections, strict=False)
    references = {role: sections[index].name for role, index in roles if index != NO_SECTION}
    described = fields | {
        "opcode": operation.opcode.name.lower(),
        "block": operation.block,
        "sources": list(operation.sources),
        "destination": operation.destination,
    }
    described.pop("sections", None)
    return described | ({"sections": references} if references else {})


def check_folder(image: Image, folder: Path) -> None:
    """Compare what lies beside an image with the image: its map, and the files that belong to it.

    Raises:
        InputError: something is missing or differs.
    """
    read_manifest(folder / MAP_NAME, KIND, SCHEMA_VERSION)
    if not is_as_written(folder / MAP_NAME, describe_image(image)):
        raise InputError(f"{folder / MAP_NAME}: does not describe {IMAGE_NAME}; {CURE}")
    for name, digest in image.metadata().files.items():
        if not (folder / name).is_file():
            raise InputError(f"{folder / name}: not found; {CURE}")
        if digest_file(folder / name) != digest:
            raise InputError(f"{folder / name}: differs from the file that was compiled; {CURE}")


def hex_lines(image: Image, section: Section) -> Iterator[str]:
    """A section as text for Verilog's $readmemh: one element a line, its most significant digit first."""
    width = section.dtype.itemsize
    flat = image.array(section).reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        big_endian = flat[start : start + _CHUNK].astype(_NUMPY[section.dtype].newbyteorder(">"), copy=False)
        yield big_endian.tobytes().hex("\n", width) + "\n"
