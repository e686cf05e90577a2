"""Rows of text from local files: plain text, JSON lines, Parquet."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oasis_cli.errors import InputError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
TEXT_FIELD = "text"


def read_rows(path: Path) -> tuple[str, ...]:
    """The rows of a local file, whose ending says what it holds; anything unknown is plain text.

    Raises:
        InputError: the file is missing, a folder, unreadable or not what its ending says.
    """
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            raise InputError(f"{path}: a folder, not a text; name one file (.txt, .jsonl or .parquet) in it")
        if suffix in PARQUET_SUFFIXES:
            return read_parquet(path)
        return read_json_lines(path) if suffix in JSON_SUFFIXES else read_text_rows(path)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason}); convert or unpack it first") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error


def read_text_rows(path: Path) -> tuple[str, ...]:
    """The lines as the hub's WikiText holds them: each with its newline, but "" for one of white space only."""
    with path.open(encoding="utf-8-sig") as lines:
        return tuple(line if line.strip() else "" for line in lines)


def read_json_lines(path: Path) -> tuple[str, ...]:
    """One row a line: field `text`, or the only field of the first record that holds a string."""
    field = None
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = _parse_record(line, where=f"{path}, line {number}")
            if field is None:
                strings = [name for name, value in record.items() if isinstance(value, str)]
                field = text_field(record, strings, where=f"{path}, line {number}")
            rows.append(checked_text(record.get(field), field, where=f"{path}, line {number}"))
    return tuple(rows)


def read_parquet(path: Path) -> tuple[str, ...]:
    """One row a record: column `text`, or the only column of strings.

    Raises:
        InputError: no sound Parquet file, or no such column.
    """
    import pyarrow as arrow  # type: ignore[import-untyped]  # slow to import, and few texts are Parquet
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            strings = [f.name for f in schema if arrow.types.is_string(f.type) or arrow.types.is_large_string(f.type)]
            field = text_field(schema.names, strings, where=str(path))
            values = file.read(columns=[field]).column(field).to_pylist()
    except arrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a sound Parquet file ({_first_line(error)}); fetch or write it again") from error
    return tuple(checked_text(value, field, where=f"{path}, record {n}") for n, value in enumerate(values, start=1))


def text_field(fields: Iterable[str], strings: list[str], where: str) -> str:
    """Which of the `fields` holds the text, given those that hold `strings`.

    Raises:
        InputError: there is no `text`, and no or several fields of strings.
    """
    if TEXT_FIELD in strings:
        return TEXT_FIELD
    if len(strings) == 1:
        return strings[0]
    seen = ", ".join(fields) or "none"
    raise InputError(
        f'{where}: no field "{TEXT_FIELD}" with a string and not exactly one other that has one (fields: {seen}); '
        f'rename the field of the text to "{TEXT_FIELD}"'
    )


def checked_text(value: object, field: str, where: str) -> str:
    """The value, once it is known to be a string that can be written in UTF-8.

    Raises:
        InputError: it is none; the message opens with `where` and names the field.
    """
    if not isinstance(value, str):
        raise InputError(f'{where}: field "{field}" holds no string ({_kind(value)}); mend or drop the record')
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(f'{where}: field "{field}" holds half a character ({error.reason}); mend it') from error
    return value


def _parse_record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}); one JSON object a line is needed") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: not a JSON object ({_kind(record)}); one object a line is needed")
    return record


def _kind(value: object) -> str:
    return "nothing there" if value is None else type(value).__name__


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
