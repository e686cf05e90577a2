from dataclasses import field
from pathlib import Path

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from oasis_cli.config import STRICT, from_mapping, load_yaml
from oasis_cli.errors import InputError


@dataclass(frozen=True, config=STRICT)
class Line:
    count: int = Field(ge=1)
    clock: float = 5e8


@dataclass(frozen=True, config=STRICT)
class Chip:
    name: str
    line: Line = field(default_factory=lambda: Line(count=16))
    fast: bool = False
    note: str | None = None


def load(tmp_path: Path, text: str) -> Chip:
    (tmp_path / "chip.yaml").write_text(text)
    return load_yaml(tmp_path / "chip.yaml", Chip)


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    chip = load(tmp_path, "name: yes\nline: {count: 4, clock: 5e8}\nfast: true\nnote: ~\n")
    assert chip == Chip(name="yes", line=Line(count=4, clock=5e8), fast=True, note=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nlin: {count: 1}\n", "line 2: lin is not a known key; did you mean line?"),
        ("name: a\nline: {cuont: 1}\n", "line 2: line.cuont is not a known key; did you mean count?"),
        ("name: a\nname: b\n", "line 2: name is given twice"),
        ("fast: true\n", "name is missing"),
        ("name: a\nline:\n  count: 0\n", "line 3: line.count: input should be greater than or equal to 1, got 0"),
        ("name: a\nline: {count: 010}\n", "line 2: line.count: input should be a valid integer, got '010'"),
        ("name: a\nfast: yes\n", "line 2: fast: input should be a valid boolean, got 'yes'"),
        ("name: [a\n", "not valid YAML"),
        ("", "the file is empty"),
        ("- a\n", "expected keys and values at the top level, found list"),
        ("name: !!python/object:os.system a\n", "not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        load(tmp_path, "nam: a\nline: {count: 0}\nfast: 3\n")
    for part in ("nam is not a known key; did you mean name?", "name is missing", "line.count", "fast"):
        assert part in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_yaml(tmp_path / "none.yaml", Chip)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(InputError, match="not UTF-8"):
        load_yaml(tmp_path / "latin.yaml", Chip)


def test_plain_mappings_are_checked_alike() -> None:
    with pytest.raises(InputError, match=r"command line: line\.count"):
        from_mapping({"name": "a", "line": {"count": -1}}, Chip, "command line")
