import os
from pathlib import Path

import pytest
from filelock import FileLock

from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import (
    UnwritableError,
    atomic_file,
    output_directory,
    refuse_occupied,
    refuse_unwritable,
    write_result,
    write_text,
)

needs_plain_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill_and_fail(out: Path, error: type[BaseException], resumable: bool = False) -> None:
    """An output folder whose writer fails after its first file."""
    with output_directory(out, "mark", resumable=resumable) as folder:
        (folder / "part").write_text("done")
        raise error


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "before\n")

    def fail_halfway() -> None:
        with atomic_file(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert (tmp_path / "a").read_text() == "before\n"
    assert listing(tmp_path) == ["a"]


def test_a_full_disk_is_one_sentence() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with (
        pytest.raises(InputError, match=r"cannot be written \(no space left on device\)"),
        atomic_file(Path("/dev/null/x")),
    ):
        Path("/dev/full").write_text("x" * 10_000)


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    with output_directory(tmp_path / "out", "mark") as folder:
        (folder / "mark").touch()
        assert not (tmp_path / "out").exists()
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt])
def test_a_failed_folder_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises((error, InputError)):
        fill_and_fail(tmp_path / "out", error)
    assert listing(tmp_path) == []


def test_an_interrupted_resumable_folder_is_taken_up(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fill_and_fail(tmp_path / "out", KeyboardInterrupt, resumable=True)
    with output_directory(tmp_path / "out", "mark", resumable=True, resume=True) as folder:
        assert (folder / "part").read_text() == "done"
        (folder / "mark").touch()
    assert listing(tmp_path) == ["out"]


def test_without_resume_an_interrupted_folder_starts_afresh(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fill_and_fail(tmp_path / "out", KeyboardInterrupt, resumable=True)
    with output_directory(tmp_path / "out", "mark", resumable=True) as folder:
        assert listing(folder) == []
        (folder / "mark").touch()


def test_what_holds_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    for overwrite in (False, True):
        with (
            pytest.raises(InputError, match="already holds something else"),
            output_directory(tmp_path / "out", "mark", overwrite=overwrite),
        ):
            pass
    assert listing(tmp_path / "out") == ["thesis.tex"]


def test_an_earlier_result_is_replaced_only_when_allowed(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with output_directory(tmp_path / "out", "mark", overwrite=content == "two") as folder:
            (folder / "mark").write_text(content)
        with pytest.raises(InputError, match="pass --overwrite"), output_directory(tmp_path / "out", "mark"):
            pass
    assert (tmp_path / "out" / "mark").read_text() == "two"
    assert listing(tmp_path) == ["out"]


def test_a_file_or_link_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(InputError, match="is not a folder"), output_directory(tmp_path / name, "mark"):
            pass


def test_a_parent_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"), output_directory(tmp_path / "file" / "out", "mark"):
        pass


@needs_plain_user
def test_a_read_only_parent_is_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="permission denied"), output_directory(tmp_path / "out", "mark"):
        pass


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with output_directory(out, "mark") as folder:
        (folder / "mark").touch()
        before = listing(out.parent)
        with (
            pytest.raises(InputError, match=rf"out: is being written by another run \(process {os.getpid()}\); wait"),
            output_directory(out, "mark"),
        ):
            pass
        assert listing(out.parent) == before
    assert listing(out.parent) == ["out"]


def test_what_another_run_finished_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends between the first look at the place and the lock."""
    acquire = FileLock.acquire

    def finished_first(lock: FileLock, *args: object, **options: object) -> object:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mark").touch()
        return acquire(lock, *args, **options)

    monkeypatch.setattr(FileLock, "acquire", finished_first)
    with pytest.raises(InputError, match="already holds a finished result"), output_directory(tmp_path / "out", "mark"):
        pass
    assert listing(tmp_path) == ["out"]


def test_folders_made_for_an_output_go_with_it(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with pytest.raises(RuntimeError):
        fill_and_fail(tmp_path / "kept" / "a" / "b" / "out", RuntimeError)
    assert listing(tmp_path / "kept") == []


def test_a_failed_write_inside_an_output_is_told_of_the_output(tmp_path: Path) -> None:
    def fill_and_fail_to_write() -> None:
        with output_directory(tmp_path / "out", "mark") as folder:
            (folder / "file").touch()
            write_text(folder / "file" / "x", "text")

    with pytest.raises(UnwritableError, match=r"out: cannot be written \(not a directory\)"):
        fill_and_fail_to_write()
    assert listing(tmp_path) == []


@pytest.mark.parametrize("error", [InputError, OSError, RuntimeError, KeyboardInterrupt])
def test_what_an_earlier_run_finished_outlives_a_failed_resumption(tmp_path: Path, error: type[BaseException]) -> None:
    def resume_and_fail() -> None:
        with output_directory(tmp_path / "out", "mark", resumable=True, resume=True):
            raise error

    with pytest.raises(KeyboardInterrupt):
        fill_and_fail(tmp_path / "out", KeyboardInterrupt, resumable=True)
    with pytest.raises((error, InputError)):
        resume_and_fail()
    assert (tmp_path / ".out.partial" / "part").read_text() == "done"


def test_an_interruption_between_two_renames_keeps_the_earlier_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with output_directory(out, "mark") as folder:
        (folder / "mark").write_text("one")
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == ".out.partial":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), output_directory(out, "mark", overwrite=True) as folder:
        (folder / "mark").write_text("two")
    assert listing(tmp_path) == ["out"]
    assert (out / "mark").read_text() == "one"


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_folder_without_a_name_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot be renamed; choose an --out inside it"):
        refuse_occupied(Path(name), "mark", overwrite=True)


def test_a_mount_point_is_refused() -> None:
    """It can be written into, and even be empty, but no folder can take its place."""
    if not Path("/proc").is_mount():
        pytest.skip("no /proc on this system")
    with pytest.raises(InputError, match="cannot be renamed"):
        refuse_occupied(Path("/proc"), "mark", overwrite=True)


def test_a_result_makes_its_folders_and_takes_them_back(tmp_path: Path) -> None:
    write_result(tmp_path / "a" / "b" / "result", "text\n")
    assert (tmp_path / "a" / "b" / "result").read_text() == "text\n"
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match="file/c/result: cannot be written"):
        write_result(tmp_path / "file" / "c" / "result", "text\n")
    assert listing(tmp_path) == ["a", "file"]


def test_a_result_follows_links_and_goes_into_pipes(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    write_result(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "after"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_result(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_whether_a_result_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "a" / "b" / "result")
    refuse_unwritable(Path("/dev/null"))
    with pytest.raises(InputError, match="is a folder; name a file"):
        refuse_unwritable(tmp_path)
    assert listing(tmp_path) == []
