"""A few commands as they are really started: `python -m oasis_cli`, and `oasis` where it is installed."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oasis_cli.version import __version__
from tests.cli.conftest import process_environment
from tests.conftest import Chain

Process = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_module(process: Process) -> None:
    found = process("--version")
    assert (found.returncode, found.stdout, found.stderr) == (0, f"oasis, version {__version__}\n", "")


def test_the_script() -> None:
    script = Path(sys.executable).with_name("oasis")
    if not script.exists():
        pytest.skip("the package is not installed into this environment, so there is no `oasis` beside its python")
    found = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (0, f"oasis, version {__version__}\n")


def test_statuses_reach_the_shell(process: Process) -> None:
    usage, bad = process("frobnicate"), process("simulate", "--shape", "llama-2-7")
    assert (usage.returncode, usage.stdout, usage.stderr.count("\n")) == (2, "", 1)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (3, "", 1)


def test_json_to_a_pipe(process: Process) -> None:
    found = process("simulate", "--shape", "llama-2-7b", "--decode", 4, "--json", "-")
    assert found.stderr == ""
    assert json.loads(found.stdout)["command"] == "simulate"


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/fd/1"])
def test_json_to_a_pipe_by_name(process: Process, target: str) -> None:
    if not Path(target).exists():
        pytest.skip(f"no {target} on this system")
    found = process("-q", "simulate", "--shape", "llama-2-7b", "--decode", 4, "--json", target)
    assert json.loads(found.stdout[found.stdout.index("{") :])["command"] == "simulate", found.stderr


@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_a_full_disk_behind_standard_output(options: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    command = [sys.executable, "-m", "oasis_cli", "simulate", "--shape", "llama-2-7b", "--decode", "4", *options]
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            command, env=process_environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert found.returncode == 3
    assert found.stderr.startswith("error: standard output: cannot be written (no space left on device)")
    assert found.stderr.count("\n") == 1


def test_a_reader_that_has_seen_enough() -> None:
    command = [sys.executable, "-m", "oasis_cli", "simulate", "--shape", "llama-2-7b", "--decode", "4"]
    with subprocess.Popen(
        command, env=process_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""


def test_a_terminal_that_lacks_characters(process: Process) -> None:
    """The table's lines, dots and signs are not in ASCII."""
    found = process("simulate", "--shape", "llama-2-7b", "--decode", 4, PYTHONIOENCODING="ascii")
    assert found.returncode == 0
    assert found.stderr == ""
    assert found.stdout.isascii()


def test_a_folder_whose_name_looks_like_markup(chain: Chain, tmp_path: Path) -> None:
    from tests.conftest import run_cli

    folder = tmp_path / "[bold]runs[/bold]:smile:"
    shutil.copytree(chain.calibration, folder)
    said = run_cli("verify", folder).stdout.replace("\n", "")
    assert "[bold]runs[/bold]:smile:" in said
