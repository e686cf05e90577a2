"""Does an image lie on disk as docs/image-format.md says, and is every damaged one refused?"""

import hashlib
import random
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oasis_cli.errors import InputError
from oasis_cli.formats import image_table
from oasis_cli.formats.image import SectionDraft, hex_lines, open_image, write_image
from oasis_cli.formats.image_table import Section, SectionKind, SectionType, encode_head

PAGE = 4096
CODEBOOK = SectionDraft("a.codebook", SectionKind.CODEBOOK, SectionType.F16, (2,), lambda: [b"\x00\xbc", b"\x00\x3c"])
TABLE = SectionDraft(
    "b.table", SectionKind.DENSE, SectionType.F32, (3, 2), lambda: [np.arange(6, dtype="<f4").tobytes()]
)
DRAFTS = (CODEBOOK, TABLE)
DOCS = Path(__file__).parents[2] / "docs" / "image-format.md"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    write_image(tmp_path / "model.oimg", DRAFTS)
    return tmp_path / "model.oimg"


def entry(name: bytes, kind: int, dtype: int, shape: tuple[int, ...], offset: int, data: bytes) -> bytes:
    """A table entry from the page's table, independent of the code."""
    sizes = (*shape, *(0,) * (4 - len(shape)))
    head = name.ljust(128, b"\0") + struct.pack("<HHIQQ4Q8x", kind, dtype, len(shape), offset, len(data), *sizes)
    return head + hashlib.sha256(data).digest() + bytes(32)


def golden() -> bytes:
    """The whole file of `DRAFTS` from the page's tables."""
    values = np.arange(6, dtype="<f4").tobytes()
    table = entry(b"a.codebook", 5, 3, (2,), PAGE, b"\x00\xbc\x00\x3c")
    table += entry(b"b.table", 4, 5, (3, 2), 2 * PAGE, values)
    header = b"OASIS\r\n\x1a" + struct.pack("<IIQQIIQ48x", 1, 128, 3 * PAGE, 128, 2, 256, PAGE)
    head = header + hashlib.sha256(header + table).digest() + table
    return head.ljust(PAGE, b"\0") + b"\x00\xbc\x00\x3c".ljust(PAGE, b"\0") + values.ljust(PAGE, b"\0")


def test_file_is_what_the_page_says(image: Path) -> None:
    assert image.read_bytes() == golden()


def test_the_page_explains_a_real_file(tmp_path: Path) -> None:
    """The bytes of the worked example are those that the writer gives."""
    example = SectionDraft("demo.codebook", SectionKind.CODEBOOK, SectionType.F16, (2,), lambda: [b"\x00\xbc\x00\x3c"])
    write_image(tmp_path / "demo.oimg", [example])
    lines = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    shown = bytearray(2 * PAGE)  # "those not shown are zero"
    for offset, text in lines:
        piece = bytes.fromhex(text)
        shown[int(offset, 16) : int(offset, 16) + len(piece)] = piece
    assert (tmp_path / "demo.oimg").read_bytes() == shown


def test_arrays_come_back(image: Path) -> None:
    opened = open_image(image, verify=True)
    assert opened.array(opened.section("a.codebook")).tolist() == [-1.0, 1.0]
    assert opened.array(opened.section("b.table")).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert [section.name for section in opened.sections] == ["a.codebook", "b.table"]


def test_arrays_are_private(image: Path) -> None:
    before = image.read_bytes()
    opened = open_image(image)
    opened.array(opened.section("b.table"))[:] = 7
    assert image.read_bytes() == before


def test_a_folder_means_the_image_in_it(image: Path) -> None:
    assert open_image(image.parent).path == image


def test_bfloat16_is_read_as_bits(tmp_path: Path) -> None:
    draft = SectionDraft("x", SectionKind.DENSE, SectionType.BF16, (1,), lambda: [b"\x80\x3f"])
    write_image(tmp_path / "x.oimg", [draft])
    opened = open_image(tmp_path / "x.oimg")
    assert opened.array(opened.section("x")).tolist() == [0x3F80]


def test_hex_is_one_element_a_line_most_significant_first(image: Path) -> None:
    opened = open_image(image)
    assert "".join(hex_lines(opened, opened.section("a.codebook"))) == "bc00\n3c00\n"
    assert "".join(hex_lines(opened, opened.section("b.table"))).splitlines()[:2] == ["00000000", "3f800000"]


def test_equal_drafts_give_equal_bytes(image: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "again.oimg", DRAFTS)
    assert (tmp_path / "again.oimg").read_bytes() == image.read_bytes()


def flips(image: Path, bits: Iterator[int]) -> Iterator[int]:
    """Flip one bit at a time in the file and yield it; the file is whole again afterwards."""
    with image.open("r+b", buffering=0) as file:
        for bit in bits:
            file.seek(bit // 8)
            good = file.read(1)
            file.seek(bit // 8)
            file.write(bytes([good[0] ^ 1 << bit % 8]))
            yield bit
            file.seek(bit // 8)
            file.write(good)


def refusal(image: Path) -> str:
    """What opening the image is refused with; empty if it is not."""
    try:
        open_image(image)
    except InputError as error:
        return str(error)
    return ""


def test_every_flipped_bit_of_header_and_table_is_refused_on_opening(image: Path) -> None:
    for bit in flips(image, iter(range((128 + 2 * 256) * 8))):
        message = refusal(image)
        assert message.startswith(f"{image}: "), bit
        assert "\n" not in message
    assert refusal(image) == ""


def test_every_other_flipped_bit_is_found_by_its_check(image: Path) -> None:
    head, rest = 128 + 2 * 256, 3 * PAGE
    sampled = random.Random(5).sample(range(head * 8, rest * 8), 600)
    data = [*range(PAGE * 8, (PAGE + 4) * 8), *range(2 * PAGE * 8, (2 * PAGE + 24) * 8)]
    for bit in flips(image, iter(sampled + data)):
        opened = open_image(image)
        with pytest.raises(InputError, match=r"(checksum|padding).*run oasis compile again"):
            opened.check()
        if bit % 100 == 0:
            with pytest.raises(InputError, match="run oasis compile again"):
                open_image(image, verify=True)


def test_every_truncation_is_refused(image: Path) -> None:
    whole = image.read_bytes()
    for length in [*range(140), *range(600, 680), PAGE - 1, PAGE, PAGE + 2, 2 * PAGE + 5, 3 * PAGE - 1]:
        image.write_bytes(whole[:length])
        with pytest.raises(InputError) as error:
            open_image(image)
        assert re.search("truncated|not an OASIS image", str(error.value)), length


def test_a_longer_file_is_refused(image: Path) -> None:
    image.write_bytes(image.read_bytes() + b"\0")
    with pytest.raises(InputError, match="longer than it says"):
        open_image(image)


def test_a_newer_version_is_refused_clearly(image: Path) -> None:
    data = bytearray(image.read_bytes())
    data[8] = 2
    image.write_bytes(data)
    with pytest.raises(InputError, match=r"format version 2, this tool reads up to 1; update oasis-cli"):
        open_image(image)


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(200), b"OASIS\n\x1a" + bytes(200)])
def test_other_files_are_no_images(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(InputError, match="not an OASIS image"):
        open_image(tmp_path / "other")


def test_a_missing_image(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.oimg: not found; run oasis compile"):
        open_image(tmp_path)


def _section(name: str, offset: int, shape: tuple[int, ...] = (PAGE,)) -> Section:
    return Section(name, SectionKind.DENSE, SectionType.U8, shape, offset, bytes(32))


def _file_of(path: Path, sections: list[Section], pages: int | None = None) -> Path:
    """A file whose header is sound by its checksum, whatever its sections say."""
    head = bytearray(encode_head(sections))
    if pages is not None:
        head[16:24] = (pages * PAGE).to_bytes(8, "little")
        head[96:128] = hashlib.sha256(head[:96] + head[128:]).digest()
    length = int.from_bytes(head[16:24], "little")
    path.write_bytes(bytes(head).ljust(length, b"\0"))
    return path


@pytest.mark.parametrize(
    ("sections", "pages", "message"),
    [
        ([_section("a", PAGE), _section("b", PAGE)], None, "section b overlaps"),
        ([_section("a", 0)], 2, "section a overlaps"),
        ([_section("a", 2 * PAGE), _section("b", PAGE)], 3, "a gap lies before section a"),
        ([_section("a", PAGE + 1)], 3, "not aligned"),
        ([_section("a", 2 * PAGE)], None, "a gap"),
        ([_section("a", PAGE, (2 * PAGE,))], 2, "beyond the file"),
        ([_section("a", PAGE, (2**40, 2**20))], 2, "beyond the file"),
        ([_section("a", PAGE), _section("a", 2 * PAGE)], None, "two sections"),
        ([_section("a", PAGE)], 3, "bytes follow"),
    ],
)
def test_misplaced_sections_are_refused(
    tmp_path: Path, sections: list[Section], pages: int | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        open_image(_file_of(tmp_path / "x.oimg", sections, pages))


@pytest.mark.parametrize(
    ("start", "value", "message"),
    [
        (128 + 128, b"\xff\xff", "table entry"),  # kind
        (128 + 130, b"\x00\x00", "table entry"),  # dtype
        (128 + 132, b"\x00", "table entry"),  # rank
        (128 + 132, b"\x05", "table entry"),
        (128 + 144, b"\x05", "its shape takes 4"),  # length
        (128 + 152, b"\x00", "table entry"),  # a size
        (128 + 184, b"\x01", "reserved bytes"),
        (128 + 255, b"\x01", "reserved bytes"),
        (128, b"\xff", "table entry"),  # name
        (48, b"\x01", "damaged header"),
        (12, b"\x81", "damaged header"),
        (40, b"\x01", "does not fit"),
        (32, b"\x00\x00\x00\x00", "does not fit"),
        (32, b"\xff\xff\xff\xff", "does not fit"),
    ],
)
def test_impossible_heads_with_a_sound_checksum_are_refused(
    tmp_path: Path, start: int, value: bytes, message: str
) -> None:
    path = tmp_path / "x.oimg"
    write_image(path, [CODEBOOK])
    data = bytearray(path.read_bytes())
    data[start : start + len(value)] = value
    data[96:128] = hashlib.sha256(data[:96] + data[128 : 128 + 256]).digest()
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        open_image(path)


def test_a_failed_write_leaves_the_old_file(image: Path) -> None:
    before = image.read_bytes()
    short = replace(TABLE, shape=(3, 3))
    with pytest.raises(ValueError, match="yielded 24 bytes, it declared 36"):
        write_image(image, [CODEBOOK, short])
    assert image.read_bytes() == before
    assert [path.name for path in image.parent.iterdir()] == [image.name]


@pytest.mark.parametrize("drafts", [[], [CODEBOOK, CODEBOOK], [replace(CODEBOOK, name="é" * 65)]])
def test_impossible_drafts_are_a_bug(tmp_path: Path, drafts: list[SectionDraft]) -> None:
    with pytest.raises(ValueError, match=r"at least one section|repeat|printable"):
        write_image(tmp_path / "x.oimg", drafts)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_image(tmp_path / "absent" / "x.oimg", DRAFTS)


def test_the_table_grows_by_whole_pages() -> None:
    assert image_table.data_start(15) == PAGE
    assert image_table.data_start(16) == 2 * PAGE
