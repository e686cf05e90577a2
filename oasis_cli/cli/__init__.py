"""The command line: click only. A command parses, calls one library function, and renders its result."""

from oasis_cli.cli.group import main

__all__ = ["main"]
