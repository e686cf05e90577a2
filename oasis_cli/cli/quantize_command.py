"""`oasis quantize`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oasis_cli.cli.options import (
    UserPath,
    common_options,
    device_option,
    json_option,
    lay_over,
    out_option,
    overwrite_option,
    resume_option,
    threads_option,
)
from oasis_cli.cli.render import emit_json, head, megabytes, progress_bars, show_pairs

if TYPE_CHECKING:
    from oasis_cli.quantization import QuantizationSettings


def _parse_bits(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[dict[str, Any]] | None:
    """`down_proj$=W3A4` as an entry of `overrides`; either half of the bits may be left out."""
    entries = []
    for value in values:
        pattern, _equals, bits = value.rpartition("=")
        found = re.fullmatch(r"(?:[Ww](\d+))?(?:[Aa](\d+))?", bits)
        if not pattern or not bits or found is None:
            raise click.BadParameter(f"{value!r} is not like 'down_proj$=W3A4'")
        sides = {"weight_bits": found[1], "act_bits": found[2]}
        entries.append({"layers": pattern} | {name: int(side) for name, side in sides.items() if side})
    return entries or None


@click.command(
    name="quantize",
    epilog="Example: oasis quantize ./SmolLM2-135M --calibration calibration --out quantized",
)
@click.argument("model")
@out_option
@click.option("--calibration", type=UserPath(), required=True, metavar="DIR", help="Of this very model.")
@click.option("--recipe", type=UserPath(), metavar="FILE", help="Take settings from a recipe.")
@click.option(
    "--method",
    metavar="NAME",
    help="oasis-plus, oasis, oasis-s, or to compare with: rtn, smoothquant, quarot, atom, mxfp4, nvfp4."
    "  [default: oasis-plus]",
)
@click.option(
    "--preset",
    type=click.Choice(["fast", "default", "best"]),
    help="Of oasis-plus: passes fewer calibration sequences and tunes nothing, or passes more.",
)
@click.option("--weight-bits", type=int, help="Bits of weight indices, 1 to 4.  [default: 4]")
@click.option("--act-bits", type=int, help="Bits of activation indices, 1 to 4; 16 for none.  [default: 4]")
@click.option("--ignore", multiple=True, metavar="REGEX", help="Layers to leave as they are; repeatable.")
@click.option(
    "--bits",
    "overrides",
    multiple=True,
    metavar="REGEX=W3A4",
    callback=_parse_bits,
    help="Other bits for some layers; repeatable.",
)
@click.option("--kv-bits", type=int, help="Bits of cached keys and values, 1 to 4.  [default: as they are]")
@click.option("--head-bits", type=int, help="Bits of the output head's weights.  [default: as it is]")
@click.option("--outliers", "outlier_fraction", type=float, help="Outliers a side.  [default: as calibrated]")
@click.option("--codebook-grid", metavar="GRID", help="int8 (exact LUTs) or fp16.  [default: int8]")
@click.option("--scale-kind", metavar="KIND", help="Token scale, of oasis-plus.  [default: mean_abs]")
@click.option("--feedback-samples", type=int, help="Sequences that guide weights, of oasis-plus.  [default: 8]")
@click.option("--tune-epochs", type=float, help="Passes of tuning by gradient, of oasis-plus.  [default: 1]")
@click.option("--wide-channels", type=int, help="Channels at 8 bits, of atom.  [default: 1 of 32]")
@click.option("--seed", type=int, help="Of K-Means.  [default: 0]")
@device_option
@threads_option
@resume_option
@overwrite_option
@json_option
@common_options
def command(
    model: str,
    out: Path,
    calibration: Path,
    recipe: Path | None,
    preset: str | None,
    device: str,
    threads: int | None,
    resume: bool,
    overwrite: bool,
    **given: Any,
) -> None:
    """Turn the weights of MODEL's linear layers into indices, codebooks and scales.

    The result is a Hugging Face folder; embeddings, biases and the output head stay as they are. Methods oasis and
    oasis-s are the paper's and take seconds. oasis-plus, in the very same format, chooses numbers for what the model
    gives out, and tunes scales, codebooks and norms: minutes for 135M parameters, and a third of the loss or less.
    """
    from oasis_cli.models.checkpoint import open_checkpoint
    from oasis_cli.models.device import resolve_device
    from oasis_cli.pipeline.recipe import stage_settings
    from oasis_cli.quantization import quantize
    from oasis_cli.quantization.settings import PRESETS

    given["ignore"] = given["ignore"] or None
    settings = stage_settings(recipe).quantize
    method = given["method"] or settings.method
    if preset is not None:
        if method != "oasis-plus":
            raise click.UsageError(f"--preset: a setting of oasis-plus, not of {method}")
        given = {**given, **{name: value for name, value in PRESETS[preset].items() if given.get(name) is None}}
    _refuse_foreign_options(method, given)
    options = lay_over(settings, given)
    checkpoint = open_checkpoint(model)
    with progress_bars() as progress:
        result = quantize(
            checkpoint,
            out,
            calibration,
            options,
            device=str(resolve_device(device, threads)),
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
    show_pairs(
        f"{checkpoint.name}, quantized: {options.method} {_shown_bits(options)}",
        {
            "folder": str(result.folder),
            "layers": str(result.layers),
            "their size": f"{megabytes(result.bytes_before)} at 16 bits -> {megabytes(result.bytes_after)}",
            "left as it is": megabytes(result.bytes_other),
            "weight error": f"{result.relative_error:.3%} of the weights' squares",
            **({"stored": "dense, to compare with: the sizes are the method's"} if options.is_baseline else {}),
            **_tuned(result.tuning),
            "time": f"{result.seconds:.1f} s",
        },
    )
    emit_json(
        head("quantize", {"model": result.model_digest})
        | {"folder": str(result.folder), "layers": result.layers, "relative_error": result.relative_error}
        | {"bytes": {"before": result.bytes_before, "after": result.bytes_after, "other": result.bytes_other}}
        | {"tuning": result.tuning, "seconds": result.seconds}
    )


def _shown_bits(options: "QuantizationSettings") -> str:
    mixed = " mixed" if options.overrides or options.ignore else ""
    cache = "" if options.kv_bits is None else f" KV{options.kv_bits}"
    return f"W{options.weight_bits}A{options.act_bits}{mixed}{cache}"


def _refuse_foreign_options(method: str, given: Mapping[str, Any]) -> None:
    """Refuse options that the method does not have, also where they were given their default.

    Raises:
        click.UsageError: naming the option.
    """
    from oasis_cli.quantization.settings import METHODS, refuse_foreign

    if method not in METHODS:  # which is said where it is checked
        return
    options = {str(parameter.name): parameter.opts[0] for parameter in click.get_current_context().command.params}
    for name, value in given.items():
        if value is not None:
            try:
                refuse_foreign(method, [name])
            except ValueError as error:
                raise click.UsageError(str(error).replace(name, options[name], 1)) from None


def _tuned(report: Mapping[str, Any] | None) -> dict[str, str]:
    """A line on tuning, where there was any."""
    if report is None:
        return {}
    first, last = report["divergence_before"], report["divergence_after"]
    return {"tuning": f"{report['steps']} steps, KL from the original {first:.4f} -> {last:.4f} nats"}
