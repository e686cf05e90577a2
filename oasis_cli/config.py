"""One strict YAML loader for recipes, targets and shapes: every mistake named with its key and line, all at once.

Settings are frozen pydantic dataclasses declared with `config=STRICT`; they own their defaults.
"""

import difflib
import json
import re
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from oasis_cli.errors import InputError

STRICT = ConfigDict(extra="forbid", strict=True)

T = TypeVar("T")
_Location = tuple[str | int, ...]

_EXPECTED = {"dataclass_type": "keys and values", "dict_type": "keys and values"} | dict.fromkeys(
    ("list_type", "tuple_type"), "a list"
)
"""What pydantic calls by names of JSON or Python, by its type of error."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `5e8` is a number, `010` and `yes` are text (PyYAML's own 1.1 rules say otherwise)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name and shape


def _float_scalar(loader: yaml.SafeLoader, node: Any) -> float:
    return float(loader.construct_scalar(node))


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:float", _float_scalar)


def _build(node: yaml.Node, where: _Location, lines: dict[_Location, int], problems: list[str]) -> Any:
    """Plain data from YAML nodes, remembering each key's line and refusing duplicates."""
    lines.setdefault(where, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            lines[(*where, key)] = key_node.start_mark.line + 1
            if key in result:
                problems.append(f"line {key_node.start_mark.line + 1}: {_dotted((*where, key))} is given twice")
            result[key] = _build(value_node, (*where, key), lines, problems)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*where, i), lines, problems) for i, item in enumerate(node.value)]
    loader = _Loader("")
    return loader.construct_object(node, deep=True)


def _dotted(location: _Location) -> str:
    return ".".join(str(part) for part in location)


def _member_names(cls: Any, location: _Location) -> list[str]:
    """Names known beside the key at `location`, for "did you mean"."""
    for part in location[:-1]:
        if is_dataclass(cls):
            cls = get_type_hints(cls).get(str(part))
        elif get_origin(cls) is dict:
            cls = get_args(cls)[1]
        # Optional[X] and unions: the first dataclass among the members
        cls = next((member for member in get_args(cls) if is_dataclass(member)), cls)
    return [field.name for field in fields(cls)] if is_dataclass(cls) else []


def _explain(cls: type, error: ValidationError, lines: Mapping[_Location, int]) -> list[str]:
    """One phrase a mistake; pydantic's own wording where it is plain enough."""
    phrases = []
    for item in error.errors(include_url=False):
        location = tuple(part for part in item["loc"] if part in ("", *lines) or not str(part).startswith("function-"))
        known = next((location[:end] for end in range(len(location), -1, -1) if location[:end] in lines), ())
        prefix = f"line {lines[known]}: " if known in lines else ""
        name = _dotted(location)
        expected = _EXPECTED.get(item["type"])
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            near = difflib.get_close_matches(str(location[-1]), _member_names(cls, location), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            phrases.append(f"{prefix}{name} is not a known key{hint}")
        elif item["type"] in ("missing", "missing_argument"):
            phrases.append(f"{prefix}{name} is missing")
        else:
            message = f"Input should be {expected}" if expected else item["msg"].removeprefix("Value error, ")
            shown = item["type"] != "value_error" and not isinstance(item["input"], dict | list)
            got = f", got {item['input']!r}" if shown else ""
            phrase = message[0].lower() + message[1:] + got
            # what concerns the whole file has no key and no line
            phrases.append(f"{prefix}{name}: {phrase}" if location else phrase)
    return phrases


def from_mapping(data: Any, cls: type[T], where: str, lines: Mapping[_Location, int] | None = None) -> T:
    """Build the settings class `cls` from plain data.

    Args:
        data: a mapping, as parsed from YAML or JSON.
        cls: a pydantic dataclass declared with `config=STRICT`.
        where: what to call the source in messages (a file's path, "--set").
        lines: line of each key path, where known.

    Raises:
        InputError: listing every unknown, missing or impossible key with its line.
    """
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected keys and values at the top level, found {type(data).__name__}")
    try:
        # JSON mode: strict about scalars, yet objects may become dataclasses and lists tuples
        return TypeAdapter(cls).validate_json(json.dumps(data))
    except ValidationError as error:
        raise InputError(f"{where}: " + "; ".join(_explain(cls, error, lines or {}))) from None


def parse_yaml(text: str, where: str) -> tuple[Any, dict[_Location, int]]:
    """Plain data of a YAML text and the line of every key path.

    Raises:
        InputError: not YAML, or a key given twice.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{where}: {line}not valid YAML ({error.problem})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None
    if node is None:
        raise InputError(f"{where}: the file is empty")
    lines: dict[_Location, int] = {}
    problems: list[str] = []
    try:
        data = _build(node, (), lines, problems)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None
    if problems:
        raise InputError(f"{where}: " + "; ".join(problems))
    return data, lines


def load_yaml(path: Path, cls: type[T]) -> T:
    """Read one YAML file into the settings class `cls`.

    Raises:
        InputError: unreadable, not YAML, or not what `cls` declares; all mistakes are listed at once.
    """
    data, lines = parse_yaml(read_text(path), str(path))
    return from_mapping(data, cls, str(path), lines)


def read_text(path: Path) -> str:
    """Text of a settings file.

    Raises:
        InputError: the file is missing, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None
