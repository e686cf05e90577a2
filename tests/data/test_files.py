import json
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from oasis_cli.data.files import read_rows
from oasis_cli.errors import InputError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_json_lines(path: Path, *records: Any) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("name", ["wiki.test.raw", "a.txt", "a.TXT", "no_ending"])
def test_text_lines_are_rows_with_their_newline_and_blank_ones_are_empty(tmp_path: Path, name: str) -> None:
    """As in the hub's wikitext-2-raw-v1, whose rows are "", " = Robert Boulter = \\n", "", …"""
    path = write(tmp_path / name, " \n = Robert Boulter = \n \n Robert <unk> is .\n\t\nlast")
    assert read_rows(path) == ("", " = Robert Boulter = \n", "", " Robert <unk> is .\n", "", "last")


def test_line_ends_of_other_systems_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\r\n")
    assert read_rows(path) == ("one\n", "", "two\n")


def test_only_line_ends_part_rows(tmp_path: Path) -> None:
    text = "form\x0cfeed, next\x85line, line\u2028separator\n"
    assert read_rows(write(tmp_path / "a.txt", text)) == (text,)


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.JSONL"])
def test_json_lines_have_a_row_a_record(tmp_path: Path, name: str) -> None:
    path = write_json_lines(tmp_path / name, {"id": "x", "text": "one\ntwo"}, {"text": "", "id": "y"})
    write(path, path.read_bytes() + b"\n  \n")
    assert read_rows(path) == ("one\ntwo", "")


def test_the_only_string_field_is_the_text(tmp_path: Path) -> None:
    assert read_rows(write_json_lines(tmp_path / "a.jsonl", {"n": 1, "sentence": "one"})) == ("one",)
    assert read_rows(write_parquet(tmp_path / "a.parquet", n=[1, 2], sentence=["one", "two"])) == ("one", "two")


def test_parquet_reads_the_text_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", url=["u", "v"], text=pa.array(["one", "two"], pa.large_string()))
    assert read_rows(path) == ("one", "two")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": ', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", "[" * 100_000, "a.jsonl, line 1: not JSON"),
        ("a.json", '[{"text": "one"}]', "a.json, line 1: not a JSON object (list)"),
        ("a.jsonl", '{"text": "one"}\n{"txt": "two"}', 'a.jsonl, line 2: field "text" holds no string (nothing there)'),
        ("a.jsonl", '{"text": "one"}\n\n{"text": 2}', 'a.jsonl, line 3: field "text" holds no string (int)'),
        ("a.jsonl", '{"a": "x", "b": "y"}', 'line 1: no field "text" with a string and not exactly one other'),
        ("a.jsonl", '{"a": 1, "b": 2}', "(fields: a, b)"),
        ("a.jsonl", "{}", "(fields: none)"),
        ("a.jsonl", '{"text": "\\ud800"}', 'line 1: field "text" holds half a character'),
        ("a.txt", "Zürich".encode("latin-1"), "a.txt: not UTF-8 text"),
        ("a.txt", "Zürich".encode("utf-16"), "a.txt: not UTF-8 text"),
        ("a.jsonl", b"\x1f\x8b\x08\x00\xff", "a.jsonl: not UTF-8 text"),
        ("a.parquet", b"PAR1 and then something else", "a.parquet: not a sound Parquet file"),
        ("a.parquet", b"", "a.parquet: not a sound Parquet file"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_rows(write(tmp_path / name, content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_parquet_file_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=["one"] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"a\.parquet: not a sound Parquet file"):
        read_rows(path)


def test_parquet_names_the_columns_it_has_and_the_record_without_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(fields: a, b\)"):
        read_rows(write_parquet(tmp_path / "a.parquet", a=["x"], b=["y"]))
    with pytest.raises(InputError, match=r'record 2: field "text" holds no string'):
        read_rows(write_parquet(tmp_path / "b.parquet", text=["x", None]))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.txt: no such file"):
        read_rows(tmp_path / "gone.txt")
    with pytest.raises(InputError, match="a folder, not a text"):
        read_rows(tmp_path)
