"""Do imports point the way that docs/architecture.md says, is what we import declared, and does nobody pay early?"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import oasis_cli

ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"
PACKAGE = Path(oasis_cli.__file__).parent
HEAVY = {"torch", "transformers", "faiss", "datasets", "safetensors"}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    if not PYPROJECT.is_file():
        pytest.skip("pyproject.toml is not here: these tests look at a checkout")
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))


def test_imports_point_down(settings: dict[str, Any]) -> None:
    pytest.importorskip("importlinter", reason="import-linter is not installed; it is part of the extra dev")
    # in a process of its own, for it configures logging and sys.path
    call = f"lint_imports(config_filename={str(PYPROJECT)!r}, no_cache=True, no_logo=True)"
    _run(f"from importlinter.cli import lint_imports; raise SystemExit({call})")


def test_the_layers_name_every_package(settings: dict[str, Any]) -> None:
    """import-linter checks it too; here it does not depend on the extra."""
    layers = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    named = {name.strip() for layer in layers["layers"] for name in layer.split("|")}
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert found - {"__init__", "__main__"} == named


def test_every_import_is_declared(settings: dict[str, Any]) -> None:
    """A package that only comes along with another one may be gone with its next version."""
    extras = settings["project"]["optional-dependencies"]
    optional = [requirement for name, group in extras.items() if name != "dev" for requirement in group]
    declared = {_normal(requirement) for requirement in (*settings["project"]["dependencies"], *optional)}
    owners = packages_distributions()
    undeclared: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            ours = name in sys.stdlib_module_names or name == PACKAGE.name
            if not ours and declared.isdisjoint(_normal(owner) for owner in owners.get(name, [name])):
                undeclared.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    assert undeclared == {}, "add these to [project] dependencies in pyproject.toml"


def _normal(requirement: str) -> str:
    """Name of a requirement as package indices compare names."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def _imported(tree: ast.AST) -> Iterator[str]:
    """First part of everything that a module imports, at its top or inside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


COMMANDS = sorted(path.stem for path in (PACKAGE / "cli").glob("*.py"))


@pytest.mark.parametrize(
    "code",
    [
        "import oasis_cli",
        "import " + ", ".join(f"oasis_cli.cli.{name}" for name in COMMANDS),
        "from oasis_cli import SimulationSettings, simulate_shape; "
        "assert simulate_shape('llama-2-7b', SimulationSettings(decode=1)).cycles > 0",
    ],
    ids=["oasis_cli", "commands", "simulate_shape"],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    """`oasis -h` and timing by sizes answer at once because torch is not there."""
    assert _run(f"{code}\nimport sys; print(*sorted({HEAVY!r} & sys.modules.keys()))") == []


def test_public_names_resolve_and_are_listed() -> None:
    assert _run("import oasis_cli; print(*[n for n in oasis_cli.__all__ if getattr(oasis_cli, n, None) is None])") == []
    assert set(oasis_cli.__all__) == {"__version__", *oasis_cli._HOMES}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = oasis_cli.nothing


def _run(code: str) -> list[str]:
    """Words that a fresh Python prints."""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.split()
