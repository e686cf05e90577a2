"""`oasis compile`."""

from pathlib import Path

import click

from oasis_cli.cli.options import UserPath, common_options, json_option, out_option, overwrite_option
from oasis_cli.cli.render import byte_size, emit_json, head, progress_bars, show_table


@click.command(name="compile", epilog="Example: oasis compile quantized --target oasis-28nm --out image")
@click.argument("quantized", type=UserPath())
@out_option
@click.option("--recipe", type=UserPath(), metavar="FILE", help="Take settings from a recipe.")
@click.option("--target", metavar="NAME|FILE", help="Accelerator.  [default: oasis-28nm]")
@click.option("--emit", type=click.Choice(["hex"]), help="Also write every section as text for $readmemh.")
@overwrite_option
@json_option
@common_options
def command(
    quantized: Path, out: Path, recipe: Path | None, target: str | None, emit: str | None, overwrite: bool
) -> None:
    """Lay the quantized folder QUANTIZED out as a memory image: LUTs, boundaries, indices as streamed, program."""
    from oasis_cli.compiler.compile import compile_model
    from oasis_cli.formats.manifest import digest_file

    with progress_bars() as progress:
        chosen = target or _target(recipe)
        result = compile_model(quantized, out, chosen, progress=progress, overwrite=overwrite, emit_hex=emit == "hex")
    rows = [[kind, byte_size(size)] for kind, size in sorted(result.section_bytes.items(), key=lambda item: -item[1])]
    show_table(
        f"{result.image}: {byte_size(result.file_bytes)}, {result.sections} sections, {result.operations} operations",
        ["section kind", "size"],
        rows,
        numeric=[1],
    )
    emit_json(
        head("compile", {"image": digest_file(result.image)})
        | {"folder": str(result.out), "image": str(result.image), "bytes": result.file_bytes}
        | {"sections": result.sections, "operations": result.operations, "section_bytes": result.section_bytes}
    )


def _target(recipe: Path | None) -> str:
    from oasis_cli.pipeline.recipe import stage_settings

    return stage_settings(recipe).compile.target
