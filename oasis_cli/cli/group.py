"""The `oasis` group: commands are imported when they are asked for, and every refusal ends in one line and a status."""

import difflib
import importlib
import sys
from typing import Any, Final

import click

from oasis_cli.cli.options import common_options, debug_wanted
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

    def invoke(self, ctx: click.Context) -> Any:
        """Run, and end with the status that the outcome has."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click itself would exit 1
            click.echo("interrupted: what was finished is kept; --resume continues where the command has it", err=True)
            ctx.exit(INTERRUPTED)
        except OasisError as error:
            if debug_wanted(ctx):
                raise
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_status)


@click.group(
    cls=OasisGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: oasis demo",
)
@click.version_option(__version__, prog_name="oasis")
@common_options
def oasis() -> None:
    """Take a language model to non-uniform 4-bit weights and activations, and on to an accelerator.

    calibrate -> quantize -> compile -> simulate, with eval at any point; each step leaves a folder that the next reads.
    """


def main() -> None:
    """Entry point of the `oasis` command."""
    try:
        oasis.main(prog_name="oasis")
    except KeyboardInterrupt:  # before or after a command runs, as while importing
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
