"""Writes that are there whole or not at all: a temporary name beside the target, then a rename."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from oasis_cli.errors import InputError


class UnwritableError(InputError):
    """The system refused a write (full disk, no permission, vanished folder).

    Attributes:
        reason: in the system's words.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path}: cannot be written ({reason}); nothing was changed: free space or choose another place"
        )
        self.reason = reason


def explain(error: OSError | UnwritableError, path: Path) -> UnwritableError:
    """The refusal that an error stands for, under the name that the user knows the place by."""
    reason = error.reason if isinstance(error, UnwritableError) else (error.strerror or str(error)).lower()
    return UnwritableError(path, reason)


def partial_name(path: Path) -> Path:
    """The temporary name that stands in for `path` while it is being written."""
    return path.with_name(f".{path.name}.partial")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it becomes `path`, on any failure it is removed.

    Raises:
        InputError: the system refused the write.
    """
    temporary = partial_name(path)
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())  # some libraries create files that only their owner may read
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise explain(error, path) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically, UTF-8 with the newlines given."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_result(path: Path, content: str | bytes) -> None:
    """Write a result where a user wants it: the folder is made, links are followed, and a pipe or device is written to.

    Args:
        path: the file.
        content: text, written in UTF-8 with the newlines given, or the bytes themselves.

    Raises:
        InputError: the system refused the write.
    """
    raw = content.encode() if isinstance(content, str) else content
    target = path.resolve()
    absent = _absent_parents(target)
    try:
        if path.exists() and not path.is_file():  # renaming a file over /dev/null would be no favour
            path.write_bytes(raw)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as temporary:
            temporary.write_bytes(raw)
    except (OSError, UnwritableError) as error:
        _remove_empty(absent)
        raise explain(error, path) from error


def refuse_unwritable(path: Path) -> None:
    """Check early that `write_result` may write to `path`, before hours of work.

    Raises:
        InputError: a folder is there, or the place cannot be written.
    """
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder; name a file")
        if not path.exists() or path.is_file():
            _probe(path)
    except OSError as error:
        raise explain(error, path) from error


def _probe(path: Path) -> None:
    """Write something in the folder that is to hold `path`, or in the nearest one above it that is there."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    probe = folder / f".oasis-probe-{os.getpid()}"
    try:
        probe.touch()
    finally:
        probe.unlink(missing_ok=True)


def is_finished(path: Path, marker: str) -> bool:
    """Whether an artifact that holds `marker` stands at `path`.

    Raises:
        InputError: the system does not say.
    """
    try:
        return (path / marker).is_file()
    except OSError as error:
        raise explain(error, path) from error


def refuse_occupied(path: Path, marker: str, overwrite: bool) -> None:
    """Check early that `path` may become an output folder, before hours of work.

    Args:
        path: the folder to be written.
        marker: a file that tells an earlier artifact of the same kind, the only thing that `overwrite` may replace.
        overwrite: whether the user allowed to replace it.

    Raises:
        InputError: something else is there, or `overwrite` was not given, or the place cannot be written.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise InputError(f"{path}: is not a folder; choose another --out")
        if path.name in ("", "..") or path.is_mount():
            raise InputError(f"{path}: a folder that cannot be renamed; choose an --out inside it")
        if path.is_dir() and any(path.iterdir()):
            if not (path / marker).is_file():
                raise InputError(f"{path}: already holds something else; choose another --out")
            if not overwrite:
                raise InputError(f"{path}: already holds a finished result; choose another --out or pass --overwrite")
        _probe(path)
    except OSError as error:
        raise explain(error, path) from error


@contextmanager
def output_directory(
    path: Path, marker: str, *, overwrite: bool = False, resumable: bool = False, resume: bool = False
) -> Iterator[Path]:
    """Yield a folder under a temporary name; on success it becomes `path`, on failure nothing of it is left.

    Args:
        path: the folder wanted.
        marker: see `refuse_occupied`; the caller must have written it by the end.
        overwrite: replace an earlier artifact that holds `marker`.
        resumable: an interrupted run leaves the temporary folder, for a later one to go on in it.
        resume: take up the temporary folder of an interrupted run, which then outlives a failure too; without it,
            start afresh.

    Raises:
        InputError: the place is occupied, another process is writing it, or the system refused the write.
    """
    refuse_occupied(path, marker, overwrite)
    absent = _absent_parents(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _sole_writer(path):
            refuse_occupied(path, marker, overwrite)  # another run may have finished since
            with _partial_folder(path, resumable, resume) as temporary:
                yield temporary
    except BaseException as error:
        _remove_empty(absent)
        if isinstance(error, OSError | UnwritableError):
            raise explain(error, path) from error
        raise


@contextmanager
def _sole_writer(path: Path) -> Iterator[None]:
    """Hold the lock on writing `path`; the system releases it when the process ends, however that comes about."""
    place = path.with_name(f".{path.name}.lock")
    lock = FileLock(place)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"{path}: is being written by another run{_holder(place)}; wait, or choose another --out"
        ) from None
    try:
        with suppress(OSError):  # on a full disk, let what matters say so
            place.write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        with suppress(OSError):
            place.unlink()  # while it is held: who opened it meanwhile sees that it is gone, and does not take it
        lock.release()


def _holder(lock: Path) -> str:
    """Who holds a lock, as far as its file tells."""
    try:
        number = lock.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return f" (process {number})" if number.isdigit() else ""


@contextmanager
def _partial_folder(path: Path, resumable: bool, resume: bool) -> Iterator[Path]:
    """The folder under its temporary name, renamed at the end; see `output_directory` for what outlives a failure."""
    temporary = partial_name(path)
    taken_up = resume and temporary.exists()
    try:
        if temporary.exists() and not resume:
            shutil.rmtree(temporary)
        temporary.mkdir(exist_ok=True)
        yield temporary
        _swap(temporary, path)
    except BaseException as error:
        if not taken_up and not (resumable and isinstance(error, KeyboardInterrupt)):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _absent_parents(path: Path) -> list[Path]:
    """The folders that must be made before `path` can be, the innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, as far as they are empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _swap(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`; an earlier artifact goes only once the new one stands."""
    old = path.with_name(f".{path.name}.old")
    try:
        if path.exists():
            if old.exists():
                shutil.rmtree(old)
            path.rename(old)
        temporary.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
