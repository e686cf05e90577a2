"""Ctrl-C in every command: status 130, one line, nothing half-written but what --resume goes on from."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.conftest import Finished, WarmProcess, contents, process_environment
from tests.conftest import Chain, run_cli

Stages = dict[str, tuple[object, ...]]


def is_interrupted(found: Finished) -> bool:
    return (found.status, found.stdout, found.stderr.count("\n"), found.stderr[:11]) == (130, "", 1, "interrupted")


def at(path: str, event: str = "os.rename", count: int = 1) -> dict[str, object]:
    """The process interrupts itself when it is about to do this, which then does not happen."""
    return {"event": event, "path": path, "count": count}


@pytest.mark.parametrize(
    ("stage", "moments"),
    [
        (
            "calibrate",
            [
                (at(".state.safetensors.partial"), []),
                (at(".state.safetensors.partial", count=3), ["state.safetensors"]),
                (at(".calibration.json.partial"), ["calibration.safetensors"]),
                (at(".out.partial"), ["calibration.json", "calibration.safetensors"]),
            ],
        ),
        (
            "quantize",
            [
                (at("..report-00001.json.partial"), ["model-00001-of-00005.safetensors"]),
                (
                    at("..report-00003.json.partial"),
                    [
                        *(f".report-0000{n}.json" for n in (1, 2)),
                        *(f"model-0000{n}-of-00005.safetensors" for n in (1, 2, 3)),
                    ],
                ),
                (
                    at(".model.safetensors.index.json.partial"),
                    [
                        *(f".report-0000{n}.json" for n in (1, 2, 3, 4, 5)),
                        *(f"model-0000{n}-of-00005.safetensors" for n in (1, 2, 3, 4, 5)),
                    ],
                ),
            ],
        ),
    ],
)
def test_a_stage_that_is_interrupted_again_and_again_gives_equal_bytes(
    warm: WarmProcess, workspace: Path, chain: Chain, stage: str, moments: list[tuple[dict[str, object], list[str]]]
) -> None:
    args, whole = {
        "calibrate": (("calibrate", chain.model, "--samples", 4, "--seqlen", 128), chain.calibration),
        "quantize": (
            ("quantize", chain.model, "--calibration", chain.calibration, "--method", "oasis"),
            chain.quantized,
        ),
    }[stage]
    for moment, kept in moments:
        found = warm.run(*args, "--out", "deep/out", "--resume", "-q", cwd=workspace, interrupt=moment)
        assert is_interrupted(found), found
        assert sorted(path.name for path in (workspace / "deep").iterdir()) == [".out.partial"]
        assert sorted(path.name for path in (workspace / "deep" / ".out.partial").iterdir()) == kept
    assert run_cli(*args, "--out", "deep/out", "--resume").exit_code == 0
    assert sorted(path.name for path in (workspace / "deep").iterdir()) == ["out"]
    assert lasting(workspace / "deep" / "out") == lasting(whole)


def lasting(folder: Path) -> dict[str, str]:
    """Contents without the files that hold seconds."""
    seconds = {"quantization_report.json", "run.json"}
    return {name: content for name, content in contents(folder).items() if Path(name).name not in seconds}


def test_an_interrupted_compilation_leaves_nothing(warm: WarmProcess, workspace: Path, stages: Stages) -> None:
    for name in (".model.oimg.partial", ".image.json.partial"):
        event = {"event": "open", "path": name, "count": 1}
        found = warm.run(*stages["compile"], "--out", "deep/out", cwd=workspace, interrupt=event)
        assert is_interrupted(found), found
        assert contents(workspace) == {}


def test_runs_and_demos_go_on_from_each_others_interruptions(
    warm: WarmProcess, workspace: Path, chain: Chain, demo: tuple[Path, Result]
) -> None:
    run = ("run", "demo-tiny", "--model", chain.model, "--out", "out", "-q")
    tiny = ("demo", "--tiny", "--out", "out", "-q")
    for args, moment, there in (
        (run, at(".state.safetensors.partial", count=5), [".calibration.partial"]),
        (tiny, at(".calibration.json.partial"), [".calibration.partial"]),
        (run, at("..report-00002.json.partial"), [".quantized.partial", "calibration"]),
        (tiny, at(".model.oimg.partial", event="open"), ["calibration", "quantized"]),
        (run, at(".simulation.json.partial"), ["calibration", "image", "quantized"]),
        (
            tiny,
            at(".run.json.partial"),
            ["calibration", "evaluation", "evaluation", "image", "quantized", "simulation"],
        ),
    ):
        found = warm.run(*args, cwd=workspace, interrupt=moment)
        assert is_interrupted(found), found
        assert sorted(path.name.split("-")[0].split(".json")[0] for path in (workspace / "out").iterdir()) == there
    assert run_cli(*tiny).exit_code == 0
    assert lasting(workspace / "out") == lasting(demo[0])


@pytest.mark.parametrize("what", ["model", "quantized", "image"])
def test_an_evaluation(warm: WarmProcess, workspace: Path, chain: Chain, what: str) -> None:
    """All windows of 16 tokens take seconds; the interruption comes in the first half of one."""
    found = interrupt_soon(warm, "eval", getattr(chain, what), "--seqlen", 16, cwd=workspace)
    assert is_interrupted(found), found
    assert contents(workspace) == {}


def test_a_functional_simulation(warm: WarmProcess, workspace: Path, chain: Chain) -> None:
    args = ("simulate", chain.image, "--decode", 4, "--functional", "--seqlen", 16, "--limit", 5000)
    found = interrupt_soon(warm, *args, "--reference", chain.quantized, "--json", "result.json", cwd=workspace)
    assert is_interrupted(found), found
    assert contents(workspace) == {}


def interrupt_soon(warm: WarmProcess, *args: object, cwd: Path) -> Finished:
    number = warm.start(*args, cwd=cwd)
    time.sleep(0.4)
    os.kill(number, signal.SIGINT)
    return warm.finish()


def test_verify(warm: WarmProcess, workspace: Path, chain: Chain) -> None:
    event = {"event": "open", "path": "model.oimg", "count": 1}
    assert is_interrupted(warm.run("verify", chain.image, cwd=workspace, interrupt=event))


def test_while_importing(workspace: Path, chain: Chain) -> None:
    """At two moments in real processes, side by side; C++ that is being imported must not turn it into an abort."""
    command = [sys.executable, "-m", "oasis_cli", "eval", str(chain.quantized), "--seqlen", "16"]
    running = [
        subprocess.Popen(
            command, env=process_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=workspace
        )
        for _ in range(2)
    ]
    for process, library in zip(running, ("libtorch_cpu", "tokenizers"), strict=True):
        wait_for_library(process, library)
        process.send_signal(signal.SIGINT)
    for process in running:
        stdout, stderr = process.communicate(timeout=60)
        assert is_interrupted(Finished(process.returncode, stdout, stderr)), stderr


def wait_for_library(process: subprocess.Popen[str], name: str) -> None:
    """Wait until a library is being loaded; where the system does not tell, for as long as that may take."""
    maps = Path(f"/proc/{process.pid}/maps")
    if not maps.exists():
        time.sleep(1)
        return
    deadline = time.monotonic() + 60
    while name not in maps.read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
