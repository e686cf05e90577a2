"""What an image will hold: the program bound to its sections, each section declared before its bytes exist."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from oasis_cli.compiler import model
from oasis_cli.compiler.bind import EMBEDDING, HEAD, Binder
from oasis_cli.compiler.fit import fit_program, refuse_foreign
from oasis_cli.compiler.layer import LayerTables, read_tables
from oasis_cli.compiler.program import build_program
from oasis_cli.compiler.source import CURE, QuantizedFolder
from oasis_cli.errors import InputError
from oasis_cli.formats.image import METADATA_SECTION, PROGRAM_SECTION, SectionDraft
from oasis_cli.formats.image_metadata import (
    METADATA_VERSION,
    ImageMetadata,
    ImageQuantization,
    ImageTarget,
    encode_metadata,
)
from oasis_cli.formats.image_table import SectionKind, SectionType
from oasis_cli.formats.program import DESCRIPTOR_BYTES, ModelShape, Operation, encode_program
from oasis_cli.version import __version__

# an old checkpoint may carry its rotary tables along; they follow from the configuration
_IGNORED_SUFFIX: Final = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class ImagePlan:
    """Everything that `write_image` needs, and the program for the report.

    Attributes:
        drafts: the sections, in file order.
        operations: the program, with section references.
        metadata: the words.
    """

    drafts: tuple[SectionDraft, ...]
    operations: tuple[Operation, ...]
    metadata: ImageMetadata


def plan_image(source: QuantizedFolder, target: ImageTarget, files: Mapping[str, str]) -> ImagePlan:
    """Plan the image of a quantized folder.

    Args:
        source: the quantized folder.
        target: the accelerator; its PE lines decide the order of the weight indices.
        files: digests of the files that will lie beside the image.

    Raises:
        InputError: the architecture is not supported, or tensors are absent, left over or impossible.
    """
    where, spec = str(source.path), source.spec
    refuse_foreign(spec, where)
    shape = model.read_shape(source.config, where)
    program = build_program(
        shape,
        spec.weight_bits,
        spec.act_bits,
        spec.outlier_fraction,
        scale_kind=spec.scale_kind,
        outlier_mode=spec.outlier_mode,
    )
    program = fit_program(program, spec, where)
    biased = {op.name: op.bias for op in program}
    tables = {name: read_tables(source, name, biased[name]) for name in spec.layers}
    _check_sites(source, tables)
    binder = Binder(source, shape, target.pe_lines, tables, *model.rotary_frequencies(source.config, where))
    binder.reserve(PROGRAM_SECTION)
    binder.reserve(METADATA_SECTION)
    operations = tuple(binder.bind(op) for op in program)
    _check_leftovers(source, shape)
    metadata = _describe(source, shape, target, files)
    words = encode_metadata(metadata)
    drafts = (
        _draft(PROGRAM_SECTION, SectionKind.PROGRAM, encode_program(operations), (len(operations), DESCRIPTOR_BYTES)),
        _draft(METADATA_SECTION, SectionKind.METADATA, words, (len(words),)),
        *binder.drafts,
    )
    return ImagePlan(drafts, operations, metadata)


def _draft(name: str, kind: SectionKind, data: bytes, shape: tuple[int, ...]) -> SectionDraft:
    return SectionDraft(name, kind, SectionType.U8, shape, lambda: (data,))


def _check_sites(source: QuantizedFolder, tables: Mapping[str, LayerTables]) -> None:
    """Layers of one site must agree about it: the site is quantized once for all of them."""
    first: dict[str, str] = {}
    for name, layer in source.spec.layers.items():
        other = first.setdefault(layer.site, name)
        mine, theirs = tables[name].site, tables[other].site
        same = torch.equal(mine.codebook, theirs.codebook)
        if mine.thresholds is not None and theirs.thresholds is not None:
            same = same and torch.equal(mine.thresholds, theirs.thresholds)
        if not same:
            raise InputError(f"{source.path}: {name} and {other} share a site but not its codebook; {CURE}")


def _check_leftovers(source: QuantizedFolder, shape: ModelShape) -> None:
    left = {name for name in source.untouched if not name.endswith(_IGNORED_SUFFIX)}
    if shape.tied and HEAD in left:  # stored twice, though tied
        source.declare(HEAD, (shape.vocab, shape.hidden))
        pairs = zip(source.rows(HEAD), source.rows(EMBEDDING), strict=True)
        if not all(torch.equal(head, table) for head, table in pairs):
            raise InputError(f"{source.path}: {HEAD} differs from the embedding that it is tied to; {CURE}")
        left.remove(HEAD)
    if left:
        raise InputError(f"{source.path}: the program has no place for {min(left)}; {CURE}")


def _describe(
    source: QuantizedFolder, shape: ModelShape, target: ImageTarget, files: Mapping[str, str]
) -> ImageMetadata:
    config, spec = source.config, source.spec
    return ImageMetadata(
        schema_version=METADATA_VERSION,
        tool_version=__version__,
        architecture=model.ARCHITECTURES[config.model_type],
        shape=shape,
        token_ids=model.special_tokens(config),
        rope=model.rope_parameters(config),
        attention_window=model.attention_window(config),
        quantization=ImageQuantization(
            method=spec.method,
            weight_bits=spec.weight_bits,
            act_bits=spec.act_bits,
            outlier_fraction=float(spec.outlier_fraction),
            outlier_mode=spec.outlier_mode,
            scale_kind=spec.scale_kind,
            codebook_grid=spec.codebook_grid,
        ),
        target=target,
        created_from=source.digests(),
        files=dict(files),
    )
