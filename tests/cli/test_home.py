"""`~` is the home folder wherever a path may stand: also in `--out=~/x` and in recipes, which no shell expands."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

from oasis_cli.cli.group import oasis
from oasis_cli.cli.options import UserPath
from oasis_cli.pipeline.recipe import shipped_recipes
from tests.cli.conftest import SHORT_RUN

Done = Callable[..., Result]


@pytest.fixture
def home(workspace: Path, monkeypatch: pytest.MonkeyPatch, one_block: Path, copy_of: Callable[..., Path]) -> Path:
    """The workspace, which holds a model; and nothing may be made in a folder called `~`."""
    monkeypatch.setenv("HOME", str(workspace))
    copy_of(one_block, "model")
    (workspace / "elsewhere").mkdir()
    monkeypatch.chdir(workspace / "elsewhere")
    return workspace


def path_options() -> Iterator[tuple[str, click.Parameter]]:
    top = click.Context(oasis)
    for name in oasis.list_commands(top):
        command = oasis.get_command(top, name)
        assert command is not None
        yield from ((name, parameter) for parameter in command.params if isinstance(parameter.type, click.Path))


def test_every_path_of_every_command_is_of_the_type_that_expands_it() -> None:
    found = [*path_options()]
    assert {name for name, _ in found} >= {"calibrate", "quantize", "compile", "simulate", "eval", "run", "verify"}
    assert [entry for entry in found if not isinstance(entry[1].type, UserPath)] == []


def test_the_chain(home: Path, done: Done) -> None:
    (home / "mine.yaml").write_text("calibrate: {samples: 1, seqlen: 64}\n")
    (home / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    done("calibrate", "~/model", "--recipe=~/mine.yaml", "--dataset=~/text.txt", "--out=~/new/calibration")
    done("quantize", "~/model", "--calibration=~/new/calibration", "--out=~/quantized")
    done("compile", "~/quantized", "--out=~/image")
    done("simulate", "~/image/model.oimg", "--decode", 4, "--functional", "--seqlen", 16, "--reference=~/quantized")
    done("eval", "~/image", "--ppl=~/text.txt", "--seqlen", 32, "--limit", 1, "--json=~/said/result.json")
    for artifact in ("model", "new/calibration", "quantized", "image"):
        done("inspect", f"~/{artifact}")
        done("verify", f"~/{artifact}")
    done("verify", "~/image", "--against=~/quantized")
    assert (home / "said" / "result.json").is_file()
    assert [*(home / "elsewhere").iterdir()] == []


def test_a_recipes_model_and_place(home: Path, done: Done) -> None:
    recipe = shipped_recipes()["demo-tiny"].read_text()
    (home / "mine.yaml").write_text(f"{recipe}\nmodel: ~/model\nout: ~/runs/first\n")
    done("run", "~/mine.yaml", *SHORT_RUN)
    assert (home / "runs" / "first" / "run.json").is_file()
    assert [*(home / "elsewhere").iterdir()] == []


def test_shapes_and_targets(home: Path, done: Done) -> None:
    import oasis_cli

    hardware = Path(oasis_cli.__file__).parent / "hardware"
    (home / "shape.yaml").write_bytes((hardware / "shapes" / "llama-2-7b.yaml").read_bytes())
    (home / "target.yaml").write_bytes((hardware / "targets" / "oasis-28nm.yaml").read_bytes())
    done("simulate", "--shape", "~/shape.yaml", "--target", "~/target.yaml", "--decode", 4)


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "~nobody-of-this-name/model"),
        ("verify", "~nobody-of-this-name/model"),
        ("eval", "~/missing"),
        ("compile", "~/missing", "--out=~/image"),
        ("run", "~nobody-of-this-name/mine.yaml"),
    ],
)
def test_a_home_that_is_not_there(home: Path, refused: Callable[..., Any], args: tuple[str, ...]) -> None:
    line = refused(*args)
    assert any(said in line for said in ("not found", "no such recipe file", "not a folder"))
