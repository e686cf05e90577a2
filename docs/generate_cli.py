"""Write docs/cli.md from what the commands say with `--help`.

python docs/generate_cli.py
"""

from collections.abc import Iterator
from pathlib import Path

import click

from oasis_cli.cli.group import oasis

PAGE = Path(__file__).with_name("cli.md")
COLUMNS = 80

INTRODUCTION = """# The command line

Written by `docs/generate_cli.py` from the commands' own help. To change this page, change the help and run the script.

Each step leaves a folder that the next one reads: `calibrate`, `quantize`, `compile`, `simulate`, with `eval` at any
point. `run` and `demo` chain them. `-q`, `-v` and `--debug` may stand before or after the name of a command.

Results go to standard output, progress and messages to standard error; `-q` leaves out progress, and messages but
warnings, never results. `--json FILE` writes the result for machines;
it opens with `command`, `tool_version` and `inputs`, the digests of what was read. With `--json -` nothing but the JSON
goes to standard output.

| exit status | meaning |
| --- | --- |
| 0 | done |
| 1 | a check did not hold (`verify`) |
| 2 | the command was called wrongly |
| 3 | bad input: one line on standard error names the file and the cure; `--debug` shows the traceback |
| 130 | interrupted; what was finished is kept |
"""


def page() -> str:
    """The whole page; the same for every terminal."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    # widths given here rule out the terminal's
    top = click.Context(oasis, info_name="oasis", terminal_width=COLUMNS, **oasis.context_settings)
    yield _section(top)
    for name in oasis.list_commands(top):
        command = oasis.get_command(top, name)
        if command is not None:
            yield _section(click.Context(command, info_name=name, parent=top))


def _section(context: click.Context) -> str:
    return f"## {context.command_path}\n\n```text\n{context.get_help().rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
