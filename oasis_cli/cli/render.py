"""What people see: progress bars on standard error, tables on standard output, JSON where it was asked for."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from oasis_cli.cli.options import json_target, quiet_wanted
from oasis_cli.progress import SILENT, Progress, Task


class _RichTask:
    def __init__(self, bar: RichProgress, number: Any) -> None:
        self._bar, self._number = bar, number

    def advance(self, n: int = 1) -> None:
        self._bar.advance(self._number, n)


class _RichBars:
    """Progress bars; each task is one line that goes when it is done."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar

    @contextmanager
    def task(self, description: str, total: int, unit: str = "") -> Iterator[Task]:
        number = self._bar.add_task(description, total=total, unit=unit)
        try:
            yield _RichTask(self._bar, number)
        finally:
            self._bar.remove_task(number)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars on standard error while it is a terminal and -q was not given."""
    if quiet_wanted() or not sys.stderr.isatty():
        yield SILENT
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _RichBars(bar)


def show_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> None:
    """Print a table on standard output, 80 columns wide at most where that is possible.

    Args:
        title: line above it.
        headers: with units.
        rows: cells.
        numeric: columns that align to the right.
    """
    if _stdout_taken():
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, header in enumerate(headers):
        table.add_column(header, justify="right" if column in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    _print(title, table)


def show_pairs(title: str, pairs: Mapping[str, str]) -> None:
    """Print names and values on standard output."""
    if _stdout_taken():
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(name, value)
    _print(title, table)


def _print(title: str, table: Table) -> None:
    """A table under its title, which may be wider than the table."""
    console = _console()
    with _standard_output():
        if title:
            console.print(title, style="bold")
        console.print(table)


def show_line(text: str) -> None:
    """Print one line on standard output."""
    if not _stdout_taken():
        with _standard_output():
            _console().print(text)


def emit_json(result: Mapping[str, Any]) -> None:
    """Write the result where --json wants it; nothing without the option."""
    from oasis_cli.formats.atomic import write_result

    target = json_target()
    if target is None:
        return
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    if target == "-":
        with _standard_output():
            click.echo(text, nl=False)
    else:
        write_result(Path(target), text)


def head(command: str, inputs: Mapping[str, str]) -> dict[str, Any]:
    """How every JSON result opens."""
    from oasis_cli.version import __version__

    return {"command": command, "tool_version": __version__, "inputs": dict(inputs)}


def _stdout_taken() -> bool:
    return json_target() == "-"


def _console() -> Console:
    # a pipe gets 80 columns, so that what is saved reads as it did on the screen
    # and what looks like markup is a name
    return Console(width=None if sys.stdout.isatty() else 80, highlight=False, markup=False, emoji=False)


@contextmanager
def _standard_output() -> Iterator[None]:
    """What is written inside reaches standard output, or the refusal is one sentence (a full disk behind it)."""
    from oasis_cli.formats.atomic import explain

    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough; click ends the command
        raise
    except OSError as error:
        with Path(os.devnull).open("w") as nowhere:  # else Python tries once more when it ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise explain(error, Path("standard output")) from error


def megabytes(count: int) -> str:
    """The size of a model for people."""
    return f"{count / 1e6:,.1f} MB"


def byte_size(count: int) -> str:
    """Bytes for people, in the unit that leaves something to read."""
    if count >= 1e5:
        return megabytes(count)
    return f"{count / 1e3:,.1f} KB" if count >= 1e3 else f"{count} B"
