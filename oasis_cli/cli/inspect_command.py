"""`oasis inspect`."""

import click

from oasis_cli.cli.options import common_options, json_option
from oasis_cli.cli.render import emit_json, head, show_pairs, show_table


@click.command(name="inspect", epilog="Example: oasis inspect quantized")
@click.argument("path")
@json_option
@common_options
def command(path: str) -> None:
    """Show what PATH holds: a model, a calibration, a quantized folder or an image."""
    from oasis_cli.pipeline.inspecting import inspect

    found = inspect(path)
    if found.table:
        show_table("", found.headers, found.table, numeric=range(1, len(found.headers)))
    show_pairs(f"{path}: {found.kind}", found.facts)
    emit_json(head("inspect", {}) | {"kind": found.kind, "details": dict(found.details)})
