"""The command line: click only. A command parses, calls one library function, and renders its result."""

import sys


def main() -> None:
    """Entry point of the `oasis` command."""
    try:
        # imported here, so that an interruption meanwhile ends in one line too
        from oasis_cli.cli.interruption import interrupt_between_imports

        interrupt_between_imports()
        from oasis_cli.cli.group import oasis

        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows "?" instead of a traceback
                stream.reconfigure(errors="replace")
        oasis.main(prog_name="oasis")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


__all__ = ["main"]
