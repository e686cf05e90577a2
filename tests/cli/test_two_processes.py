"""Two processes with one --out: the second is refused in one sentence, and nothing of the lock outlives either."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.conftest import contents, process_environment
from tests.conftest import Chain

# a stage that has begun to write, and goes on once a line comes
HOLDER = """
import sys
from pathlib import Path
from oasis_cli.formats.atomic import output_directory
with output_directory(Path("out"), "image.json", resumable=True) as folder:
    (folder / "image.json").touch()
    print("writing", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(workspace: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is writing `out`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, env=process_environment(), cwd=workspace, text=True, **pipes) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "writing\n"
        yield running
        running.kill()


@pytest.mark.parametrize("stage", ["calibrate", "quantize", "compile"])
def test_the_second_is_refused(
    refused: Callable[..., str], holder: subprocess.Popen[str], stages: dict[str, tuple[object, ...]], stage: str
) -> None:
    """And leaves what the first is writing as it is, which `refused` sees to."""
    line = refused(*stages[stage], "--out", "out", *(() if stage == "compile" else ("--resume",)))
    assert line == (
        f"error: out: is being written by another run (process {holder.pid}); wait, or choose another --out\n"
    )


def test_in_a_process_of_its_own(
    process: Callable[..., subprocess.CompletedProcess[str]],
    holder: subprocess.Popen[str],
    workspace: Path,
    chain: Chain,
) -> None:
    found = process("compile", chain.quantized, "--out", workspace / "out")
    assert (found.returncode, found.stdout) == (3, "")
    assert f"out: is being written by another run (process {holder.pid}); wait" in found.stderr
    holder.communicate("go on\n")
    assert holder.returncode == 0
    assert contents(workspace).keys() == {"out", "out/image.json"}


def test_a_lock_ends_with_its_process(
    done: Callable[..., Result], holder: subprocess.Popen[str], workspace: Path, chain: Chain
) -> None:
    """However that ends: what it left behind is taken over."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert sorted(path.name for path in workspace.iterdir()) == [".out.lock", ".out.partial"]
    done("compile", chain.quantized, "--out", "out")
    assert [path.name for path in workspace.iterdir()] == ["out"]
    assert contents(workspace / "out") == contents(chain.image)
    done("verify", "out", "--against", chain.quantized)
