import os
from pathlib import Path

import pytest

from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import atomic_file, output_directory, write_text

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
