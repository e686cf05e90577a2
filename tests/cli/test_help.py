"""Help, version and start-up: at once, without the heavy libraries, each with an example that parses."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator

import click
import pytest
from click.testing import Result

from oasis_cli.cli.group import oasis
from oasis_cli.version import __version__
from tests.cli.conftest import process_environment
from tests.conftest import Chain, run_cli

COMMANDS = oasis.list_commands(click.Context(oasis))
HEAVY = ["torch", "transformers", "faiss", "datasets", "numpy", "safetensors"]
SHOW = """
import sys
from oasis_cli.cli.group import oasis
for args in {calls}:
    try:
        oasis.main(args, prog_name="oasis")
    except SystemExit as finished:
        assert not finished.code, (args, finished.code)
loaded = sorted(set(sys.modules) & set({heavy}))
sys.stderr.write(" ".join(loaded))
"""


def test_there_are_commands() -> None:
    assert {"calibrate", "quantize", "compile", "simulate", "eval", "run", "demo", "inspect", "verify"} <= {*COMMANDS}


@pytest.mark.parametrize("command", [None, *COMMANDS])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_says_what_there_is_and_shows_an_example(command: str | None, option: str) -> None:
    result = run_cli(*filter(None, [command, option]))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: oasis {command or '[OPTIONS] COMMAND'}")
    assert "Example" in result.stdout
    for common in ("-q, --quiet", "-v, --verbose", "--debug", "--json FILE", "-h, --help"):
        assert common in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_help_lists_every_command() -> None:
    text = run_cli("-h").stdout
    assert all(f"\n  {command} " in text for command in COMMANDS)


def examples() -> Iterator[tuple[str, list[str]]]:
    for name in COMMANDS:
        command = oasis.get_command(click.Context(oasis), name)
        assert command is not None
        assert command.epilog
        for call in command.epilog.partition(":")[2].split(";"):
            yield name, shlex.split(call)


@pytest.mark.parametrize(("name", "words"), [*examples()])
def test_examples_are_calls_that_parse(name: str, words: list[str]) -> None:
    assert words[:2] == ["oasis", name]
    command = oasis.get_command(click.Context(oasis), name)
    assert command is not None
    command.make_context(name, words[2:], parent=click.Context(oasis)).close()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=process_environment(), capture_output=True, text=True, timeout=60, check=True)


def test_help_and_version_import_nothing_heavy() -> None:
    calls = [["-h"], ["--version"], *([command, "-h"] for command in COMMANDS)]
    found = run_python(SHOW.format(calls=calls, heavy=HEAVY))
    assert found.stderr == ""
    assert found.stdout.count("Usage: ") == 1 + len(COMMANDS)


def test_timing_by_shape_imports_no_tensor_library() -> None:
    calls = [["simulate", "--shape", "llama-2-7b", "--decode", "4"]]
    found = run_python(SHOW.format(calls=calls, heavy=["torch", "transformers", "faiss", "datasets", "safetensors"]))
    assert found.stderr == ""
    assert "llama-2-7b" in found.stdout


def test_wrong_usage_is_said_at_once() -> None:
    calls = "[['calibrate', '--nonsense']]"
    code = SHOW.format(calls=calls, heavy=HEAVY).replace("assert not finished.code", "assert finished.code == 2")
    assert run_python(code).stderr.count("\n") == 1


def test_version() -> None:
    result = run_cli("--version")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"oasis, version {__version__}\n", "")


def test_no_arguments_show_the_help() -> None:
    result = run_cli()
    assert result.exit_code == 2
    assert "Usage: oasis [OPTIONS] COMMAND" in result.stderr


@pytest.mark.parametrize("where", ["before", "after"])
def test_common_options_stand_before_or_after_the_command(chain: Chain, where: str) -> None:
    def call(*options: object) -> Result:
        args = ("inspect", chain.calibration)
        return run_cli(*options, *args) if where == "before" else run_cli(*args, *options)

    for option in ("-q", "--quiet", "-v"):
        assert "nats a token" in call(option).stdout
    assert json.loads(call("--json", "-").stdout)["command"] == "inspect"
    assert json.loads(call("-q", "--json", "-").stdout)["command"] == "inspect"


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_where_a_refusal_came_from(before: bool) -> None:
    args = ["inspect", "./missing"]
    result = run_cli(*(["--debug", *args] if before else [*args, "--debug"]))
    assert result.exit_code == 3
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.splitlines()[-1].startswith("error: missing: not found")
    assert "Traceback" not in run_cli(*args).stderr


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("oasis_cli.pipeline.inspecting.inspect", broken)
    assert isinstance(run_cli("inspect", "x").exception, ZeroDivisionError)


def test_a_message_of_several_lines_becomes_one(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "two words: not found" in refused("inspect", "./two\nwords")
