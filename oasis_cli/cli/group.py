"""The `oasis` group: commands are imported when they are asked for, and every refusal ends in one line and a status."""

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import click

from oasis_cli.cli.options import common_options, debug_wanted, json_option
from oasis_cli.errors import OasisError
from oasis_cli.version import __version__

INTERRUPTED: Final = 130
_COMMANDS: Final = {
    "calibrate": "learn activation codebooks from a model and a text",
    "quantize": "turn a model's weights into indices and codebooks",
    "compile": "lay a quantized model out as an accelerator's memory image",
    "simulate": "cycles, traffic and energy of an image on the accelerator",
    "eval": "perplexity of a model, a quantized model or an image",
    "run": "the whole chain from one recipe",
    "demo": "the whole chain on a real small model",
    "inspect": "what an artifact or a model holds",
    "verify": "whether an artifact is whole and sound",
}


class OasisGroup(click.Group):
    """Finds commands by name in `oasis_cli.cli.<name>_command` and turns errors into exit statuses."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Commands in the order of the chain, not of the alphabet."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"oasis_cli.cli.{cmd_name}_command")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest command where there is none of the name given."""
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, _COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run as a program; what click says of wrong usage becomes one line too."""
        run: Callable[[], Any] = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        try:
            status = run()
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            status = error.exit_code
        except click.UsageError as error:
            hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            _say(f"error: {error.format_message()}{hint}")
            status = error.exit_code
        except OasisError as error:  # of an option that came before the command; `invoke` sees all others
            _say(f"error: {error}")
            status = error.exit_status
        except click.Abort:  # what click makes of an interruption outside of `invoke`
            _say("interrupted")
            status = INTERRUPTED
        sys.exit(status)

    def invoke(self, ctx: click.Context) -> Any:
        """Run, and end with the status that the outcome has."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click itself would exit 1
            _say("interrupted: what was finished is kept; --resume continues where the command has it")
            ctx.exit(INTERRUPTED)
        except OasisError as error:
            if debug_wanted(ctx):
                click.echo(traceback.format_exc(), err=True)
            _say(f"error: {error}")
            ctx.exit(error.exit_status)


def _say(message: str) -> None:
    """One line on standard error, whatever the message is made of."""
    click.echo(" ".join(message.splitlines()), err=True)


@click.group(
    cls=OasisGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: oasis demo",
)
@click.version_option(__version__, prog_name="oasis")
@json_option
@common_options
def oasis() -> None:
    """Take a language model to non-uniform 4-bit weights and activations, and on to an accelerator.

    calibrate -> quantize -> compile -> simulate, with eval at any point; each step leaves a folder that the next reads.
    """
