"""What each setting is worth: a model quantized in many ways, each evaluated on the same windows as `accuracy.py` does.

    python benchmarks/variants.py results.jsonl --original MODEL --calibrate-on c4.jsonl --text wiki.test.raw \
        --work work --group ingredients

Groups: `methods` (every method, W4A4 and W4A3), `ingredients` (oasis-plus with one thing other than by default),
`outliers` (fractions; the paper's Fig. 15a), `calibration` (sequences and text; Fig. 17), `importance` (Fisher
weights or none) and `bits` (weights alone, fewer bits, cache and head). Calibrations and quantized folders are kept
below --work, so that a second run makes only what is missing; results are those of `accuracy.py`, whose `--table`
prints them.
"""

import runpy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from oasis_cli import CalibrationSettings, QuantizationSettings, calibrate, open_checkpoint, quantize
from oasis_cli.formats.baseline import BASELINES
from oasis_cli.formats.manifest import digest_bytes

accuracy = runpy.run_path(str(Path(__file__).with_name("accuracy.py")))


@dataclass(frozen=True)
class Variant:
    """One way to quantize.

    Attributes:
        name: of the row.
        quantize: settings other than the defaults.
        calibrate: settings other than the defaults, the text apart.
        other_text: whether it is calibrated on the documentation that comes with Python.
    """

    name: str
    quantize: Mapping[str, Any] = field(default_factory=dict)
    calibrate: Mapping[str, Any] = field(default_factory=dict)
    other_text: bool = False


def variants(group: str) -> Iterator[Variant]:
    """The variants of a group; its first ones are what the others are compared with."""
    paper = {"method": "oasis"}
    yield Variant("oasis", paper)
    if group == "methods":
        for bits in (4, 3):
            for method in ("oasis", "oasis-s", "oasis-plus", *BASELINES):
                if method not in ("mxfp4", "nvfp4") or bits == 4:  # they have no three bits
                    yield Variant(f"{method} W4A{bits}", {"method": method, "act_bits": bits})
        yield Variant("atom W4A4, 128 wide channels", {"method": "atom", "wide_channels": 128})
    elif group == "ingredients":
        yield Variant("oasis-plus")
        off: dict[str, dict[str, Any]] = {
            "no tuning": {"tune_epochs": 0.0},
            "no tuning, no refit": {"tune_epochs": 0.0, "refit_samples": 0},
            "no tuning, no feedback": {"tune_epochs": 0.0, "feedback_samples": 0},
            "no refit": {"refit_samples": 0},
            "no feedback": {"feedback_samples": 0},
            "4 sequences for feedback": {"feedback_samples": 4},
            "16 sequences for feedback": {"feedback_samples": 16},
            "half an epoch": {"tune_epochs": 0.5},
            "2 epochs": {"tune_epochs": 2.0},
            "half the rate": {"tune_rate": 0.001},
            "twice the rate": {"tune_rate": 0.004},
            "damping 0.001": {"damping": 0.001},
            "damping 0.1": {"damping": 0.1},
            "fp16 grid": {"codebook_grid": "fp16"},
        }
        for name, settings in off.items():
            yield Variant(f"oasis-plus, {name}", settings)
        for kind in ("absmax", "rms", "inlier_absmax"):
            yield Variant(f"oasis-plus, scale {kind}", {"scale_kind": kind})
    elif group == "outliers":
        for percent in (0, 0.5, 1, 2, 4, 6, 8, 10):
            calibration = {"outlier_fraction": percent / 200}  # half a side
            for method in ("oasis", "oasis-s"):
                yield Variant(f"{method}, {percent} % outliers", {"method": method}, calibration)
            yield Variant(f"untuned oasis-plus, {percent} % outliers", {"tune_epochs": 0.0}, calibration)
    elif group == "calibration":
        for samples in (4, 8, 16, 32):
            yield Variant(f"oasis, {samples} sequences", paper, {"samples": samples})
            yield Variant(f"oasis-plus, {samples} sequences", {}, {"samples": samples})
        yield Variant("oasis, Python's documentation", paper, {"samples": 8}, other_text=True)
        yield Variant("oasis-plus, Python's documentation", {}, {"samples": 8}, other_text=True)
    elif group == "importance":
        for bits in (4, 3):
            for importance in ("fisher", "error"):
                yield Variant(f"oasis W4A{bits}, {importance}", paper | {"act_bits": bits}, {"importance": importance})
    elif group == "bits":
        for settings in (
            {"act_bits": 16},
            {"weight_bits": 3, "act_bits": 16},
            {"weight_bits": 2, "act_bits": 16},
            {"weight_bits": 3},
            {"weight_bits": 2},
            {"kv_bits": 4},
            {"head_bits": 4},
        ):
            shown = ", ".join(f"{key} {value}" for key, value in settings.items())
            yield Variant(f"oasis, {shown}", paper | settings)
            yield Variant(f"oasis-plus, {shown}", settings)
        for method in ("rtn", "smoothquant", "quarot", "atom"):
            yield Variant(f"{method} W4A16", {"method": method, "act_bits": 16})
            yield Variant(f"{method} W4A8", {"method": method, "act_bits": 8})


@click.command(help=__doc__)
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--original", required=True, help="The model.")
@click.option("--calibrate-on", required=True, help="Text to calibrate on.")
@click.option("--text", required=True, help="Text to evaluate on.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="Folder for calibrations and models.")
@click.option(
    "--group",
    type=click.Choice(["methods", "ingredients", "outliers", "calibration", "importance", "bits"]),
    default="ingredients",
    show_default=True,
)
@click.option("--windows", default=24, show_default=True, help="Windows from the start of the text.")
@click.option("--seqlen", default=2048, show_default=True, help="Tokens in a window, and in a calibration sequence.")
@click.option(
    "--samples", default=16, show_default=True, help="Calibration sequences, where the variant says no other."
)
def main(
    results: Path,
    original: str,
    calibrate_on: str,
    text: str,
    work: Path,
    group: str,
    windows: int,
    seqlen: int,
    samples: int,
) -> None:
    """Make, evaluate, and print the table."""
    checkpoint = open_checkpoint(original)
    rows = accuracy["read"](results)
    for variant in variants(group):
        given = {"samples": samples, "seqlen": seqlen} | dict(variant.calibrate)
        settings = CalibrationSettings(dataset=None if variant.other_text else calibrate_on, **given)
        calibration = work / "calibrations" / _key(asdict(settings))
        calibrate(checkpoint, calibration, settings, resume=True)
        options = QuantizationSettings(**variant.quantize)
        folder = work / "models" / _key([asdict(settings), asdict(options)])
        done = quantize(checkpoint, folder, calibration, options, resume=True)
        click.echo(f"{variant.name}: {done.seconds:.0f} s")
        accuracy["measure"](results, rows, original, {variant.name: str(folder)}, text, windows, seqlen)
    click.echo(accuracy["markdown"](rows, "oasis"))


def _key(value: object) -> str:
    return digest_bytes(repr(value).encode()).removeprefix("sha256:")[:12]


if __name__ == "__main__":
    main()
