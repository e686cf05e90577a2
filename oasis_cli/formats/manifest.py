"""The block that opens every manifest, digests, and JSON files that are checked on reading."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import write_text
from oasis_cli.version import __version__

_CHUNK = 1 << 22
_MAX_JSON_BYTES = 1 << 28
_SEAL = "manifest_digest"


def digest_bytes(data: bytes) -> str:
    """SHA-256 of `data`, as `sha256:<hex>`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def short_digest(digest: str) -> str:
    """A digest for a table, long enough to compare by eye."""
    return f"{digest[:19]}…"


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as `sha256:<hex>`.

    Raises:
        InputError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return "sha256:" + digest.hexdigest()


def digest_of(parts: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    """One digest over named digests, independent of their order."""
    return digest_bytes(json.dumps(sorted(dict(parts).items())).encode())


def manifest(
    kind: str, schema_version: int, created_from: Mapping[str, str], recipe: Mapping[str, Any]
) -> dict[str, Any]:
    """The opening block: what this is, who wrote it, from what, with which settings."""
    return {
        "kind": kind,
        "schema_version": schema_version,
        "tool_version": __version__,
        "created_from": dict(created_from),
        "recipe": json.loads(json.dumps(recipe)),  # as it will be read back: lists for tuples
    }


def _json_text(value: Any) -> str:
    # ASCII, since a name that is not UTF-8 has characters which only an escape can carry
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically with sorted keys, so that equal content gives equal bytes."""
    write_text(path, _json_text(value))


def is_as_written(path: Path, value: Any) -> bool:
    """Whether a file that could be read holds, to the byte, what `write_json` makes of `value`."""
    return path.read_bytes() == _json_text(value).encode()


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write a manifest with the digest of its own text, so that `read_sealed` finds any change of it."""
    text = _json_text({**value, _SEAL: ""})
    write_text(path, text.replace(_seal(""), _seal(digest_bytes(text.encode())), 1))


def _seal(digest: object) -> str:
    return f'"{_SEAL}": "{digest}"'


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        InputError: absent, unreadable, far too large, or not a JSON object.
    """
    return _read_json(path)[1]


def _read_json(path: Path) -> tuple[str, dict[str, Any]]:
    """Text and content."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise InputError(f"{path}: {path.stat().st_size:,} bytes are too many for a manifest; it is damaged")
        text = path.read_bytes().decode()
        value = json.loads(text)
    except FileNotFoundError:
        raise InputError(f"{path}: not found; name the right folder, or write it again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: damaged, not JSON ({error}); write it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: damaged, holds {type(value).__name__} where an object is due; write it again")
    return text, value


def read_manifest(path: Path, kind: str, schema_version: int) -> dict[str, Any]:
    """Read a manifest of the given kind.

    Raises:
        InputError: not there, another kind of artifact, or written by a newer version of the tool.
    """
    return _check_opening(path, read_json(path), kind, schema_version)


def read_sealed(path: Path, kind: str, schema_version: int) -> dict[str, Any]:
    """Read a manifest of the given kind that `write_sealed` wrote.

    Raises:
        InputError: as `read_manifest`, or a single character is not as it was written.
    """
    text, value = _read_json(path)
    _check_opening(path, value, kind, schema_version)
    digest = value.pop(_SEAL, None)
    if digest_bytes(text.replace(_seal(digest), _seal(""), 1).encode()) != digest:
        raise InputError(f"{path}: damaged, it is not what oasis wrote; write it again")
    return value


def _check_opening(path: Path, value: dict[str, Any], kind: str, schema_version: int) -> dict[str, Any]:
    if value.get("kind") != kind:
        raise InputError(f"{path}: is {value.get('kind')!r}, not a {kind}; name the right folder")
    check_version(value.get("schema_version"), schema_version, str(path))
    return value


def check_version(found: object, known: int, where: str) -> None:
    """Refuse a schema that is newer than this tool, or no version at all.

    Raises:
        InputError: as said.
    """
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f"{where}: damaged, schema_version is {found!r}; write it again")
    if found > known:
        raise InputError(
            f"{where}: written by a newer version of oasis (schema {found}, known up to {known}); upgrade oasis"
        )


def refuse_other_run(path: Path, existing: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """For --resume: whether a finished artifact is the very one that is wanted.

    Raises:
        InputError: it came from other inputs or settings, naming those that differ.
    """
    differing = []
    for part, tell in (("created_from", _tell_input), ("recipe", _tell_setting)):
        before, now = dict(existing.get(part) or {}), dict(wanted[part])
        names = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        differing += [tell(name, before.get(name), now.get(name)) for name in names]
    if differing:
        raise InputError(
            f"{path}: was finished with {', '.join(differing)}; choose another --out, or delete this folder"
        )


def _tell_input(name: str, _before: object, _now: object) -> str:
    return f"another {name}"


def _tell_setting(name: str, before: object, now: object) -> str:
    return f"{name}={before} instead of {now}"
