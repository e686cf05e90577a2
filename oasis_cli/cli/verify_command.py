"""`oasis verify`."""

from dataclasses import asdict
from pathlib import Path

import click

from oasis_cli.cli.options import UserPath, common_options, json_option
from oasis_cli.cli.render import emit_json, head, progress_bars, show_pairs


@click.command(name="verify", epilog="Example: oasis verify image --against quantized")
@click.argument("path", type=UserPath())
@click.option("--against", type=UserPath(), metavar="DIR", help="The quantized folder or model that it came from.")
@json_option
@common_options
def command(path: Path, against: Path | None) -> None:
    """Check that PATH is whole and sound; status 1 on any damage.

    PATH is a model, a calibration, a quantized folder or an image.
    """
    from oasis_cli.pipeline.verifying import verify

    with progress_bars() as progress:
        found = verify(path, against, progress)
    show_pairs(f"{found.path}: sound {found.kind}", {str(n): phrase for n, phrase in enumerate(found.checked, start=1)})
    emit_json(head("verify", {}) | asdict(found))
