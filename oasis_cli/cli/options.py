"""Options that several commands share, and what they set up."""

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from oasis_cli.paths import user_path

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_DEBUG: Final = "oasis.debug"
_QUIET: Final = "oasis.quiet"
_JSON: Final = "oasis.json"
_MOST_THREADS: Final = 1024


class UserPath(click.Path):
    """A path that the library will look at; `~` is the user's home, also where no shell expands it."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Text from the command line as a path."""
        return user_path(str(super().convert(value, param, ctx)))


def _remember(key: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Keep an option's value for the whole invocation, whether it came before the command or after it."""

    def callback(ctx: click.Context, _: click.Parameter, value: Any) -> Any:
        if value:
            ctx.find_root().meta[key] = value
            ctx.meta[key] = value
        return value

    return callback


def _set_level(level: int) -> Callable[[click.Context, click.Parameter, bool], bool]:
    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        if value:
            logging.getLogger("oasis_cli").setLevel(level)
        return value

    return callback


def _quiet(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    _set_level(logging.WARNING)(ctx, param, value)
    return bool(_remember(_QUIET)(ctx, param, value))


def common_options(command: F) -> F:
    """`-q`, `-v` and `--debug`, which every command takes and the group too."""
    for decorator in (
        click.option("--debug", is_flag=True, expose_value=False, callback=_remember(_DEBUG), help="Show tracebacks."),
        click.option(
            "-v", "--verbose", is_flag=True, expose_value=False, callback=_set_level(logging.DEBUG), help="Log details."
        ),
        click.option(
            "-q",
            "--quiet",
            is_flag=True,
            expose_value=False,
            callback=_quiet,
            help="Results and warnings only.",
        ),
    ):
        command = decorator(command)
    _configure_logging()
    return command


def _json(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    from oasis_cli.formats.atomic import refuse_unwritable

    if value is not None and value != "-":
        value = str(user_path(value))
        refuse_unwritable(Path(value))
    _remember(_JSON)(ctx, param, value)
    return value


def json_option(command: F) -> F:
    """`--json F`: write the machine-readable result."""
    return click.option(
        "--json",
        "json_target",
        metavar="FILE",
        expose_value=False,
        callback=_json,
        help="Write the result as JSON; '-' for standard output, then nothing else goes there.",
    )(command)


class _StandardError(logging.Handler):
    """Writes to whatever standard error is at the time: while progress bars are shown, they own it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        click.echo(self.format(record), file=sys.stderr)


def _configure_logging() -> None:
    logger = logging.getLogger("oasis_cli")
    if not logger.handlers:
        handler = _StandardError()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def lay_over(options: T, given: Mapping[str, Any]) -> T:
    """Settings with the options given on the command line.

    Raises:
        click.UsageError: a value is impossible; the message names the option as it was typed.
    """
    from oasis_cli.errors import InputError
    from oasis_cli.pipeline.settings import override

    try:
        return override(options, given)
    except InputError as error:
        names = {str(parameter.name): parameter.opts[0] for parameter in click.get_current_context().command.params}
        phrases = str(error).removeprefix("command line: ").split("; ")
        raise click.UsageError("; ".join(_named(phrase, names) for phrase in phrases)) from None


def _named(phrase: str, names: Mapping[str, str]) -> str:
    """A phrase about a setting, under the name of the option that gave it."""
    name, colon, rest = phrase.partition(":")
    return names.get(name, name) + colon + rest


def debug_wanted(ctx: click.Context) -> bool:
    """Whether --debug was given anywhere."""
    return bool(ctx.find_root().meta.get(_DEBUG))


def quiet_wanted() -> bool:
    """Whether -q was given anywhere."""
    return bool(click.get_current_context().find_root().meta.get(_QUIET))


def json_target() -> str | None:
    """Where --json wants the result: a path, '-' or None."""
    target: str | None = click.get_current_context().find_root().meta.get(_JSON)
    return target


out_option = click.option("--out", type=UserPath(), required=True, metavar="DIR", help="Folder for the result.")
resume_option = click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped.")
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an earlier result of the same kind.")
device_option = click.option(
    "--device", default="auto", show_default=True, metavar="NAME", help="cpu, cuda, cuda:1, mps, or auto."
)
threads_option = click.option(
    "--threads", type=click.IntRange(1, _MOST_THREADS), help="CPU threads.  [default: all cores]"
)
