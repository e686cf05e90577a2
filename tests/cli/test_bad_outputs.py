"""Places that cannot be written to, in every stage that writes: status 3, one line, nothing half-written."""

import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result

from tests.conftest import Chain, run_cli

Refused = Callable[..., str]
Stages = dict[str, tuple[object, ...]]
STAGES = ["calibrate", "quantize", "compile"]
WRITING = [*STAGES, "run"]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_there_already_is_never_replaced_unasked(
    refused: Refused, workspace: Path, stages: Stages, chain: Chain, copy_of: Callable[..., Path], stage: str
) -> None:
    (workspace / "file").write_text("mine")
    (workspace / "other").mkdir()
    (workspace / "other" / "thesis.tex").write_text("mine")
    (workspace / "link").symlink_to("other")
    (workspace / "dangling").symlink_to("nowhere")
    for name in ("file", "link", "dangling"):
        assert f"{name}: is not a folder; choose another --out" in refused(*stages[stage], "--out", name)
    for options in ((), ("--overwrite",)):
        assert "other: already holds something else" in refused(*stages[stage], "--out", "other", *options)
    for name in (".", ".."):
        assert "a folder that cannot be renamed; choose an --out inside it" in refused(*stages[stage], "--out", name)
    finished = {"calibrate": chain.calibration, "quantize": chain.quantized, "compile": chain.image}
    copy_of(finished[stage], "finished")
    assert "already holds a finished result" in refused(*stages[stage], "--out", "finished")
    # an artifact of another kind is something else, even to --overwrite
    copy_of(finished["compile" if stage == "calibrate" else "calibrate"], "foreign")
    assert "already holds something else" in refused(*stages[stage], "--out", "foreign", "--overwrite")


@pytest.mark.parametrize("stage", WRITING)
@pytest.mark.parametrize("place", ["file/out", "file/deep/out", "/dev/null/out", "/proc/nowhere/out"])
def test_a_parent_that_takes_no_folder(
    refused: Refused, workspace: Path, stages: Stages, stage: str, place: str
) -> None:
    (workspace / "file").write_text("mine")
    assert f"{place}" in refused(*stages[stage], "--out", place)
    assert "cannot be written (" in refused(*stages[stage], "--out", place)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Files may not grow beyond so many bytes: what a full disk looks like, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("stage", "size"),
    [
        *[(stage, size) for stage in WRITING for size in (0, 1000)],
        ("calibrate", 900_000),  # the tensors file
        ("quantize", 90_000),
        ("compile", 1_000_000),
    ],
)
def test_a_full_disk(refused: Refused, stages: Stages, stage: str, size: int) -> None:
    with file_limit(size):
        line = refused(*stages[stage], "--out", "new/out")
    assert "new/out" in line
    assert "file too large" in line
    assert ".partial" not in line


def test_a_full_disk_late_in_a_run_keeps_what_is_finished(
    refused: Refused, workspace: Path, chain: Chain, copy_of: Callable[..., Path], demo: tuple[Path, Result]
) -> None:
    """The demo's folder without its image, so that the next run has it to make."""
    shutil.rmtree(copy_of(demo[0], "out") / "image")
    with file_limit(1_000_000):
        line = refused("run", "demo-tiny", "--model", chain.model, "--out", "out")
    assert line.startswith("error: out/image: cannot be written (file too large)")


@pytest.mark.parametrize("name", ["result.json", "new/deep/result.json"])
@pytest.mark.parametrize("size", [0, 100])
def test_a_full_disk_under_json(workspace: Path, chain: Chain, name: str, size: int) -> None:
    with file_limit(size):
        result = run_cli("inspect", chain.calibration, "--json", name, "-q")
    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: {name}: cannot be written (file too large)")
    assert list(workspace.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file/result.json", "cannot be written (not a directory)"),
        ("folder", "folder: is a folder; name a file"),
        ("", "is a folder; name a file"),
        ("/dev/null/x", "cannot be written (not a directory)"),
        ("/proc/nowhere", "cannot be written"),
        (300 * "x", "cannot be written (file name too long)"),
    ],
)
def test_a_place_for_json_is_looked_at_before_the_work(
    refused: Refused, workspace: Path, stages: Stages, place: str, said: str
) -> None:
    (workspace / "file").write_text("mine")
    (workspace / "folder").mkdir()
    for stage in WRITING:
        assert said in refused(*stages[stage], "--out", "out", "--json", place)
    assert said in refused("--json", place, *stages["compile"], "--out", "out")


def test_a_full_device_for_json(workspace: Path, chain: Chain) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    result = run_cli("inspect", chain.calibration, "--json", "/dev/full", "-q")
    assert result.exit_code == 3
    assert result.stderr.startswith("error: /dev/full: cannot be written (no space left on device)")


def test_json_goes_through_links_and_to_devices_instead_of_replacing_them(workspace: Path, chain: Chain) -> None:
    assert run_cli("inspect", chain.calibration, "--json", "/dev/null", "-q").exit_code == 0
    assert Path("/dev/null").is_char_device()
    (workspace / "link").symlink_to("target")
    assert run_cli("inspect", chain.calibration, "--json", "link", "-q").exit_code == 0
    assert (workspace / "link").is_symlink()
    assert (workspace / "target").read_text().startswith('{\n "command": "inspect"')


@pytest.mark.parametrize("stage", STAGES)
def test_an_earlier_result_outlives_a_failed_replacement(
    workspace: Path, stages: Stages, chain: Chain, copy_of: Callable[..., Path], refused: Refused, stage: str
) -> None:
    """`refused` compares all bytes before and after."""
    copy_of({"calibrate": chain.calibration, "quantize": chain.quantized, "compile": chain.image}[stage], "out")
    with file_limit(1000):
        refused(*stages[stage], "--out", "out", "--overwrite")


def test_resuming_with_other_settings_does_not_destroy_what_was_finished(
    workspace: Path, stages: Stages, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oasis_cli.calibration.stage import visit_sites

    calls: list[int] = []

    def interrupted(*args: object) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return visit_sites(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("oasis_cli.calibration.stage.visit_sites", interrupted)
    assert run_cli(*stages["calibrate"], "--out", "out").exit_code == 130
    line = refused(*stages["calibrate"], "--out", "out", "--resume", "--seed", 1)
    assert ".out.partial: left by a run with other settings" in line
    assert (workspace / ".out.partial" / "state.safetensors").is_file()
    assert run_cli(*stages["calibrate"], "--out", "out", "--resume").exit_code == 0
    assert len(calls) == 4  # two were done, one was interrupted, one was left
