"""How long work reports that it moves on, without knowing who listens."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One running piece of work with a known number of steps."""

    def advance(self, n: int = 1) -> None:
        """Report `n` further steps as done."""


class Progress(Protocol):
    """Whoever shows progress; the command line supplies bars, a notebook its own, tests none."""

    def task(self, description: str, total: int, unit: str = "") -> AbstractContextManager[Task]:
        """Open a task of `total` steps, counted in `unit`s; it ends with the context."""


class _SilentTask:
    def advance(self, n: int = 1) -> None:
        pass


class _Silent:
    @contextmanager
    def task(self, description: str, total: int, unit: str = "") -> Iterator[Task]:
        yield _SilentTask()


SILENT: Progress = _Silent()
