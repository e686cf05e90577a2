"""The command line: click only. A command parses, calls one library function, and renders its result."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Entry point of the `oasis` command."""
    try:
        # imported here, so that an interruption meanwhile ends in one line too
        from oasis_cli.cli.interruption import interrupt_between_imports

        interrupt_between_imports()
        from oasis_cli.cli.group import oasis

        _make_streams_lenient()
        oasis.main(prog_name="oasis")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


def _make_streams_lenient() -> None:
    """A stream that was closed takes everything; one that lacks a character shows "?" instead of a traceback."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open for as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


__all__ = ["main"]
