"""What an artifact or a model holds, as tables that the command line prints and JSON carries."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oasis_cli.formats.baseline import BASELINE_KIND, BASELINE_SCHEMA_VERSION
from oasis_cli.formats.calibration import read_calibration
from oasis_cli.formats.image import describe_image, open_image
from oasis_cli.formats.manifest import read_sealed, short_digest
from oasis_cli.formats.quantized import KIND, REPORT_NAME, SCHEMA_VERSION, QuantizationSpec
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.pipeline.artifacts import Kind, image_file, kind_of
from oasis_cli.runtime.loading import open_baseline, open_quantized


@dataclass(frozen=True)
class Inspection:
    """An artifact laid open.

    Attributes:
        kind: what it is.
        facts: names and values.
        table: rows for people.
        headers: of the table.
        details: everything, for JSON.
    """

    kind: str
    facts: Mapping[str, str]
    headers: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


def inspect(path: str | Path) -> Inspection:
    """Lay a model, a calibration, a quantized folder or an image open.

    Raises:
        InputError: it is none of these, or damaged.
    """
    return _READERS[kind_of(path)](path)


def _inspect_model(path: str | Path) -> Inspection:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    facts = {
        "name": checkpoint.name,
        "architecture": str(config.model_type),
        "weights": f"{checkpoint.weight_bytes:,} bytes in {len(checkpoint.weight_files)} files",
        "decoder blocks": str(config.num_hidden_layers),
        "hidden size": str(config.hidden_size),
        "vocabulary": str(config.vocab_size),
        "digest": short_digest(checkpoint.digest),
    }
    return Inspection(Kind.MODEL.value, facts, details={"config": config.to_dict(), "digest": checkpoint.digest})


BRIEF_NAMES = "without model.layers. and _proj; whole with --json"


def brief_name(name: str) -> str:
    """A name that leaves room for the other columns: `0.self_attn.q+k+v`."""
    return name.removeprefix("model.layers.").replace("_proj", "")


def _in_model_order(item: tuple[str, Any]) -> list[tuple[int, str]]:
    """Sort key of a named entry by which block 2 comes before block 10; JSON sorts as text."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in item[0].split(".")]


def _inspect_calibration(path: str | Path) -> Inspection:
    calibration = read_calibration(path)
    manifest = calibration.manifest
    rows = []
    for name, entry in sorted(manifest["sites"].items(), key=_in_model_order):
        threshold = entry["threshold"]
        centroids = calibration.sites[name].centroids[4].tolist()
        rows.append(
            [
                brief_name(name),
                str(entry["K"]),
                f"{centroids[0]:.3f} … {centroids[-1]:.3f}",
                f"{threshold['lower']:.3g} … {threshold['upper']:.3g}",
                f"{entry['tied_tokens'] / entry['tokens']:.1%}",
            ]
        )
    facts = {
        "model": f"{manifest['model']} ({short_digest(calibration.model_digest)})",
        "text": f"{manifest['data']} ({short_digest(manifest['created_from']['data'])})",
        "tokens": f"{manifest['tokens']:,}",
        "loss": f"{manifest['loss']:.4f} nats a token",
        "settings": ", ".join(f"{key}={value}" for key, value in calibration.recipe.items()),
        "names": BRIEF_NAMES,
    }
    headers = ["site", "K", "16 centroids of x / s_t", "outliers beyond", "tied tokens"]
    return Inspection(Kind.CALIBRATION.value, facts, headers, rows, manifest)


def _inspect_quantized(path: str | Path) -> Inspection:
    checkpoint, spec = open_quantized(path)
    block = asdict(spec)
    block.pop("layers")
    facts = {
        "settings": ", ".join(f"{key}={value}" for key, value in block.items()),
        "digest": short_digest(checkpoint.digest),
    }
    place = checkpoint.path / REPORT_NAME
    if not place.is_file():
        return _inspect_without_report(spec, facts)
    report = read_sealed(place, KIND, SCHEMA_VERSION)
    rows = [
        [
            name.removeprefix("model.layers."),
            f"{entry['N']} x {entry['K']}",
            f"W{entry['weight_bits']}A{entry['act_bits']}",
            "-" if entry["snr_db"] is None else f"{entry['snr_db']:.2f}",
            f"{entry['bits_a_weight']:.3f}",
            f"{entry['grid_cost']:+.2%}",
        ]
        for name, entry in sorted(report["layers"].items(), key=_in_model_order)
    ]
    facts = {
        "model": f"{report['model']} ({short_digest(report['created_from']['model'])})",
        "calibration": short_digest(report["created_from"]["calibration"]),
        "weight error": f"{report['totals']['relative_error']:.3%} of the weights' squares",
    } | facts
    headers = ["layer", "N x K", "format", "SNR (dB)", "bits a weight", "grid cost"]
    return Inspection(Kind.QUANTIZED.value, facts, headers, rows, report)


def _inspect_baseline(path: str | Path) -> Inspection:
    checkpoint, spec = open_baseline(path)
    rounding = next(iter(spec.layers.values())).activations
    facts = {
        "method": f"{spec.method}, one to compare with: dense weights of its values, activations rounded at run time",
        "bits": f"W{spec.weight_bits}A{spec.act_bits}",
        "activations": rounding.shown,
        "digest": short_digest(checkpoint.digest),
    }
    report = read_sealed(checkpoint.path / REPORT_NAME, BASELINE_KIND, BASELINE_SCHEMA_VERSION)
    rows = [
        [
            name.removeprefix("model.layers."),
            f"{entry['N']} x {entry['K']}",
            "-" if entry["snr_db"] is None else f"{entry['snr_db']:.2f}",
            f"{entry['bits_a_weight']:.3f}",
            "yes" if spec.layers[name].rotated else "no",
        ]
        for name, entry in sorted(report["layers"].items(), key=_in_model_order)
    ]
    headers = ["layer", "N x K", "SNR (dB)", "bits a weight", "rotated input"]
    return Inspection(Kind.BASELINE.value, facts, headers, rows, report)


def _inspect_without_report(spec: QuantizationSpec, facts: dict[str, str]) -> Inspection:
    """What config.json alone tells: transformers' `save_pretrained` writes the model anew, and not the report."""
    missing = f"{REPORT_NAME} is not there (save_pretrained leaves it out): no origin, no errors of the weights"
    rows = [
        [
            name.removeprefix("model.layers."),
            f"{layer.out_features} x {layer.in_features}",
            f"W{layer.weight_bits}A{layer.act_bits}",
        ]
        for name, layer in sorted(spec.layers.items(), key=_in_model_order)
    ]
    headers = ["layer", "N x K", "format"]
    return Inspection(Kind.QUANTIZED.value, facts | {"missing": missing}, headers, rows, spec.to_config())


def _inspect_image(path: str | Path) -> Inspection:
    image = open_image(image_file(path))
    described = describe_image(image)
    metadata = image.metadata()
    rows = [
        [brief_name(section.name), section.kind.name.lower(), f"{section.offset:,}", f"{section.length:,}"]
        for section in image.sections
    ]
    quantization = metadata.quantization
    facts = {
        "model": f"{metadata.architecture}, {metadata.shape.blocks} blocks of width {metadata.shape.hidden}",
        "target": f"{metadata.target.name}, {metadata.target.pe_lines} PE lines",
        "format": f"{quantization.method} W{quantization.weight_bits}A{quantization.act_bits}, "
        f"{quantization.codebook_grid} grid, {quantization.outlier_mode} outliers",
        "program": f"{len(image.program())} operations",
        "file": f"{image.file_bytes:,} bytes, {len(image.sections)} sections",
        "names": BRIEF_NAMES,
    }
    return Inspection(Kind.IMAGE.value, facts, ["section", "kind", "offset (B)", "length (B)"], rows, described)


_READERS = {
    Kind.MODEL: _inspect_model,
    Kind.CALIBRATION: _inspect_calibration,
    Kind.QUANTIZED: _inspect_quantized,
    Kind.BASELINE: _inspect_baseline,
    Kind.IMAGE: _inspect_image,
}
