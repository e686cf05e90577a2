"""The first bytes of `model.oimg`: the header and the section table, and every check that needs no more than them."""

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from oasis_cli.errors import InputError

MAGIC: Final = b"OASIS\r\n\x1a"  # a transfer as text changes or ends it
VERSION: Final = 1
ALIGNMENT: Final = 4096
HEADER_BYTES: Final = 128
ENTRY_BYTES: Final = 256
NAME_BYTES: Final = 128
MAX_RANK: Final = 4
CURE: Final = "run oasis compile again"
_CHECKED_BYTES: Final = 96
# magic, version, header bytes, file bytes, table offset, section count, entry bytes, data offset, reserved, checksum
_HEADER: Final = struct.Struct("<8sIIQQIIQ48x32s")
# name, kind, dtype, rank, offset, length, shape, reserved, checksum, reserved
_ENTRY: Final = struct.Struct(f"<{NAME_BYTES}sHHIQQ{MAX_RANK}Q8x32s32x")


class SectionKind(IntEnum):
    """What a section is for."""

    PROGRAM = 1
    METADATA = 2
    FREQUENCIES = 3
    DENSE = 4
    CODEBOOK = 5
    BOUNDARIES = 6
    THRESHOLDS = 7
    LUT = 8
    SCALES = 9
    INDICES = 10
    BIAS = 11


class SectionType(IntEnum):
    """Type of a section's elements, little-endian."""

    U8 = 1
    I16 = 2
    F16 = 3
    BF16 = 4
    F32 = 5

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {SectionType.U8: 1, SectionType.F32: 4}.get(self, 2)


@dataclass(frozen=True)
class Section:
    """One entry of the section table.

    Attributes:
        name: unique in its image.
        kind: what it is for.
        dtype: type of its elements.
        shape: one to four positive dimensions, row-major.
        offset: first byte in the file, a multiple of `ALIGNMENT`.
        checksum: SHA-256 of its bytes.
    """

    name: str
    kind: SectionKind
    dtype: SectionType
    shape: tuple[int, ...]
    offset: int
    checksum: bytes

    @property
    def length(self) -> int:
        """Bytes without the padding that follows."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """First byte after the section."""
        return self.offset + self.length


def align(offset: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def data_start(section_count: int) -> int:
    """Where the first section begins."""
    return align(HEADER_BYTES + section_count * ENTRY_BYTES)


def encode_head(sections: Sequence[Section]) -> bytes:
    """Header and table of an image made of `sections`, which lie where `data_start` and `align` put them.

    Raises:
        ValueError: there is no section, or a name or shape does not fit its field.
    """
    if not sections:
        raise ValueError("an image needs at least one section")
    table = b"".join(_encode_entry(section) for section in sections)
    start = data_start(len(sections))
    fields = (MAGIC, VERSION, HEADER_BYTES, align(sections[-1].end), HEADER_BYTES, len(sections), ENTRY_BYTES, start)
    unsigned = _HEADER.pack(*fields, bytes(32))[:_CHECKED_BYTES]
    return unsigned + hashlib.sha256(unsigned + table).digest() + table


def _encode_entry(section: Section) -> bytes:
    name = section.name.encode()
    if not 0 < len(name) <= NAME_BYTES or not section.name.isprintable():
        raise ValueError(f"a section's name must have 1 to {NAME_BYTES} printable bytes, got {section.name!r}")
    if not 1 <= len(section.shape) <= MAX_RANK or min(section.shape) < 1:
        raise ValueError(f"section {section.name}: shape {section.shape} is not 1 to {MAX_RANK} positive sizes")
    shape = (*section.shape, *(0,) * (MAX_RANK - len(section.shape)))
    kind, dtype, rank = section.kind, section.dtype, len(section.shape)
    return _ENTRY.pack(name, kind, dtype, rank, section.offset, section.length, *shape, section.checksum)


@dataclass(frozen=True)
class Header:
    """What an image says of itself, checked against its size."""

    file_bytes: int
    section_count: int
    checksum: bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of header and table."""
        return HEADER_BYTES + self.section_count * ENTRY_BYTES


def decode_header(data: bytes, file_bytes: int, where: str) -> Header:
    """Check the header of a file.

    Args:
        data: the first `HEADER_BYTES` bytes, or all there are.
        file_bytes: how long the file really is.
        where: the file, for messages.

    Raises:
        InputError: not an image, a newer version, a wrong length, or impossible numbers.
    """
    if not data.startswith(MAGIC[: len(data)]) or not data:
        raise InputError(f"{where}: not an OASIS image; name a model.oimg that oasis compile wrote")
    if len(data) < HEADER_BYTES:
        raise InputError(f"{where}: truncated ({file_bytes:,} bytes, the header alone has {HEADER_BYTES}); {CURE}")
    _, version, header_bytes, declared, table_offset, count, entry_bytes, start, checksum = _HEADER.unpack(data)
    if version > VERSION:
        raise InputError(f"{where}: format version {version}, this tool reads up to {VERSION}; update oasis-cli")
    if declared != file_bytes:
        fault = "truncated" if file_bytes < declared else "longer than it says"
        raise InputError(f"{where}: {fault} ({file_bytes:,} of {declared:,} bytes); {CURE}")
    known = (VERSION, HEADER_BYTES, HEADER_BYTES, ENTRY_BYTES)
    if (version, header_bytes, table_offset, entry_bytes) != known or any(data[48:_CHECKED_BYTES]):
        raise InputError(f"{where}: damaged header; {CURE}")
    if not 0 < count <= (file_bytes - HEADER_BYTES) // ENTRY_BYTES or start != data_start(count):
        raise InputError(f"{where}: damaged header (a table of {count:,} sections does not fit); {CURE}")
    return Header(declared, count, checksum)


def decode_table(head: bytes, header: Header, where: str) -> tuple[Section, ...]:
    """Check and read the section table.

    Args:
        head: the first `header.head_bytes` bytes of the file.
        header: what `decode_header` made of it.
        where: the file, for messages.

    Raises:
        InputError: the checksum is wrong, an entry is impossible, or sections are misplaced.
    """
    if hashlib.sha256(head[:_CHECKED_BYTES] + head[HEADER_BYTES:]).digest() != header.checksum:
        raise InputError(f"{where}: damaged header or section table (checksum); {CURE}")
    starts = range(HEADER_BYTES, len(head), ENTRY_BYTES)
    sections = tuple(
        _decode_entry(head[start : start + ENTRY_BYTES], f"{where}: section {number}")
        for number, start in enumerate(starts)
    )
    _check_places(sections, header, where)
    return sections


def _decode_entry(data: bytes, where: str) -> Section:
    name, kind, dtype, rank, offset, length, *rest = _ENTRY.unpack(data)
    shape, checksum = tuple(rest[:MAX_RANK]), rest[MAX_RANK]
    try:
        section = Section(
            name.rstrip(b"\0").decode(), SectionKind(kind), SectionType(dtype), shape[:rank], offset, checksum
        )
        if length != section.length:
            raise ValueError(f"{length:,} bytes, its shape takes {section.length:,}")
        if _encode_entry(section) != data:  # reserved bytes, a rank or size out of range
            raise ValueError("reserved bytes are set")
    except (ValueError, struct.error) as error:
        raise InputError(f"{where}: damaged table entry ({error}); {CURE}") from error
    return section


def _check_places(sections: Iterable[Section], header: Header, where: str) -> None:
    names: set[str] = set()
    end = header.head_bytes
    for section in sections:
        if section.name in names:
            raise InputError(f"{where}: two sections are named {section.name}; {CURE}")
        if section.offset % ALIGNMENT:
            raise InputError(f"{where}: section {section.name} is not aligned to {ALIGNMENT} bytes; {CURE}")
        if section.offset < end:
            raise InputError(f"{where}: section {section.name} overlaps what lies before it; {CURE}")
        if section.end > header.file_bytes:
            raise InputError(f"{where}: section {section.name} reaches beyond the file; {CURE}")
        if section.offset != align(end):
            raise InputError(f"{where}: a gap lies before section {section.name}; {CURE}")
        names.add(section.name)
        end = section.end
    if align(end) != header.file_bytes:
        raise InputError(f"{where}: bytes follow the last section; {CURE}")
