"""Running commands as users do, and looking at what they leave behind."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file

import oasis_cli
from tests.conftest import Chain, run_cli

SHORT_RUN = (
    *("--set", "calibrate.samples=2", "--set", "calibrate.seqlen=64"),
    *("--set", "eval.limit=1", "--set", "eval.seqlen=64"),
)
"""Makes `oasis run demo-tiny` shorter still."""


def contents(folder: Path) -> dict[str, str]:
    """Everything below a folder, hidden names too: links by target, files by digest."""
    return {path.relative_to(folder).as_posix(): _content(path) for path in sorted(folder.rglob("*"))}


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def usual_log_level() -> Iterator[None]:
    """-q and -v hold for the process, which here runs many commands."""
    yield
    logging.getLogger("oasis_cli").setLevel(logging.INFO)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that the command runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(workspace: Path) -> Callable[..., str]:
    """Runs a command that must refuse: its status, one line on standard error, and not a trace left behind."""

    def run(*args: object, status: int = 3) -> str:
        before = contents(workspace)
        result = run_cli(*args)
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        assert (result.exit_code, result.stdout) == (status, ""), result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1, result.stderr
        assert result.stderr.endswith("\n")
        assert contents(workspace) == before
        return result.stderr

    return run


@pytest.fixture
def done() -> Callable[..., Result]:
    """Runs a command that must succeed."""

    def run(*args: object) -> Result:
        result = run_cli(*args)
        assert result.exit_code == 0, (result.stderr, result.exception)
        return result

    return run


@pytest.fixture
def result_of(done: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """Runs a command with `--json -` and gives what it says; the JSON must be all that is on standard output."""

    def run(*args: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(done(*args, "--json", "-").stdout)
        return found

    return run


@pytest.fixture
def copy_of(workspace: Path) -> Callable[[Path], Path]:
    """Copies a folder into the workspace, to be damaged there."""

    def copy(folder: Path, name: str = "copy") -> Path:
        return Path(shutil.copytree(folder, workspace / name))

    return copy


def process_environment(**changes: str) -> dict[str, str]:
    """For a process that finds this very package, on one thread and without the hub."""
    root = str(Path(oasis_cli.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | changes


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m oasis_cli` in a process of its own."""

    def run(*args: object, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "oasis_cli", *map(str, args)]
        environment = process_environment(**changes)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    return run


@dataclass(frozen=True)
class Finished:
    """A finished command of the warm process."""

    status: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class WarmProcess:
    """Speaks to `warm_process.py`."""

    server: subprocess.Popen[str]
    scratch: Path

    def start(self, *args: object, cwd: Path, interrupt: dict[str, Any] | None = None) -> int:
        """Start a command in a process of its own; the process's id."""
        request = {
            "args": [str(arg) for arg in args],
            "cwd": str(cwd),
            "stdout": str(self.scratch / "stdout"),
            "stderr": str(self.scratch / "stderr"),
            "interrupt": interrupt,
        }
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return self._answer()

    def finish(self) -> Finished:
        """Wait for the command's end."""
        status = self._answer()
        return Finished(status, (self.scratch / "stdout").read_text(), (self.scratch / "stderr").read_text())

    def run(self, *args: object, cwd: Path, interrupt: dict[str, Any] | None = None) -> Finished:
        """Both."""
        self.start(*args, cwd=cwd, interrupt=interrupt)
        return self.finish()

    def _answer(self) -> int:
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        assert line, "the warm process is gone"
        return int(line)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    """Forks commands from a process that has imported everything: each is a process of its own, started at once."""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    command = [sys.executable, str(Path(__file__).with_name("warm_process.py"))]
    with subprocess.Popen(
        command, env=process_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield WarmProcess(server, tmp_path_factory.mktemp("warm"))
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """`oasis demo --tiny`, run once: its folder, not to be changed, and what it said."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    result = run_cli("demo", "--tiny", "--out", folder, "--json", folder.parent / "result.json")
    assert result.exit_code == 0, result.stderr
    return folder, result


@pytest.fixture(scope="session")
def one_block(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with its first decoder block alone, for what must run many times; its text is worse, not its files."""
    folder = Path(shutil.copytree(chain.model, tmp_path_factory.mktemp("one") / "block"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers." not in name or "layers.0." in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def stages(chain: Chain) -> dict[str, tuple[object, ...]]:
    """The stages that write a folder, short, without their --out."""
    return {
        "calibrate": ("calibrate", chain.model, "--samples", 3, "--seqlen", 64),
        "quantize": ("quantize", chain.model, "--calibration", chain.calibration),
        "compile": ("compile", chain.quantized),
        "run": ("run", "demo-tiny", "--model", chain.model, *SHORT_RUN),
    }
