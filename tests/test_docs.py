"""Are the pages true? Generated ones are fresh, paths and commands are real, code runs, and the layers are as drawn."""

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

import oasis_cli
from oasis_cli.cli.group import oasis
from oasis_cli.errors import CheckError, InputError
from oasis_cli.formats.quantized import OutlierMode
from oasis_cli.numerics.codebook import CodebookGrid
from oasis_cli.numerics.scale import SCALE_KINDS
from oasis_cli.quantization import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = Path(oasis_cli.__file__).parent
PAGES = sorted(DOCS.glob("*.md"))
GENERATORS = sorted(DOCS.glob("generate_*.py"))
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="docs are not here: these tests look at a checkout")


def by_name(path: Path) -> str:
    return path.name


def test_all_pages_are_here() -> None:
    names = {path.name for path in PAGES}
    assert names >= {"accelerator.md", "architecture.md", "cli.md", "image-format.md", "numerics.md"}
    assert names >= {"quantized-format.md", "recipes.md"}
    assert [path.name for path in GENERATORS] == ["generate_cli.py", "generate_recipes.py"]


@pytest.mark.parametrize("script", GENERATORS, ids=by_name)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_generated_pages_are_fresh(script: Path, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same in every terminal."""
    monkeypatch.setenv("COLUMNS", columns)
    generator = runpy.run_path(str(script))
    page = generator["PAGE"].read_text(encoding="utf-8")
    assert generator["page"]() == page, f"run python docs/{script.name}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=by_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_files_that_are_named_exist(page: Path) -> None:
    """A path is meant from the project, from the package, or, without a folder, from somewhere inside of it."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name in re.findall(r"`([\w./-]+\.(?:py|yaml|toml))`", text):
        places = [ROOT / name, PACKAGE / name, *(PACKAGE.rglob(name) if "/" not in name else ())]
        assert any(place.exists() for place in places) or name in WRITTEN, name


# files of a quantized folder, not of the project
WRITTEN = {"modeling_oasis.py"}


def python_blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        yield from ((f"{page.name}-{number}", block) for number, block in enumerate(blocks))


BLOCKS = dict(python_blocks())


def test_there_are_python_blocks() -> None:
    assert {name.partition("-")[0] for name in BLOCKS} == {"accelerator.md", "numerics.md"}


@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks_run(name: str) -> None:
    exec(compile(BLOCKS[name], name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_commands_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    top = click.Context(oasis, **oasis.context_settings)
    for line in re.findall(r"`oasis ([^`]+)`", text):
        words = line.split()
        command = oasis if words[0].startswith("-") else oasis.get_command(top, words[0])
        assert command is not None, line
        known = {option for parameter in command.get_params(top) for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_exit_statuses() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    for status in (CheckError.exit_status, InputError.exit_status, click.UsageError.exit_code, 130):
        assert re.search(rf"^\| {status} \|", page, flags=re.MULTILINE)


def test_the_layers_are_those_of_import_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert "\n".join(["```text", *layers, "```"]) in page
    assert f"{_in_words(len(contracts) - 1)} narrower rules" in page


def _in_words(number: int) -> str:
    return ["no", "one", "two", "three", "four", "five", "six", "seven"][number]


def test_every_package_has_a_paragraph() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    described = set(re.findall(r"\*\*`(\w+)`\*\*", page))
    assert described == {name for name in found if not name.startswith("__")}


def test_every_choice_of_the_numbers_is_explained() -> None:
    numbers, files = ((DOCS / name).read_text(encoding="utf-8") for name in ("numerics.md", "quantized-format.md"))
    for value in (*SCALE_KINDS, *get_args(OutlierMode), *get_args(CodebookGrid), *METHODS):
        assert f"`{value}`" in numbers, value
        assert f"`{value}`" in files, value
