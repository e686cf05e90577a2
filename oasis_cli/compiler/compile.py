"""`oasis compile`: a quantized folder becomes a memory image."""

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oasis_cli.compiler.plan import ImagePlan, plan_image
from oasis_cli.compiler.source import open_quantized
from oasis_cli.formats.atomic import output_directory
from oasis_cli.formats.image import (
    IMAGE_NAME,
    MAP_NAME,
    Image,
    describe_image,
    hex_lines,
    open_image,
    write_image,
)
from oasis_cli.formats.image_metadata import ImageTarget
from oasis_cli.formats.manifest import digest_file, write_json
from oasis_cli.hardware.target import Target, load_target
from oasis_cli.paths import user_path
from oasis_cli.progress import SILENT, Progress

HEX_FOLDER: Final = "hex"
# what a later step needs to turn text into tokens; transformers chooses the tokenizer's class by config.json too
TOKENIZER_FILES: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True)
class CompileResult:
    """What was compiled.

    Attributes:
        out: the folder.
        image: the image in it.
        file_bytes: size of the image.
        sections: how many sections it has.
        operations: how many operations its program has.
        section_bytes: bytes by kind of section, without padding.
    """

    out: Path
    image: Path
    file_bytes: int
    sections: int
    operations: int
    section_bytes: dict[str, int]


def compile_model(
    quantized_folder: str | Path,
    out: str | Path,
    target: Target | str | Path = "oasis-28nm",
    *,
    progress: Progress = SILENT,
    overwrite: bool = False,
    emit_hex: bool = False,
) -> CompileResult:
    """Compile a quantized model; the same folder and target give the same bytes.

    Args:
        quantized_folder: what `oasis quantize` wrote; nothing else is read.
        out: folder to write: `model.oimg`, `image.json`, the tokenizer files, and `hex/` if asked for.
        target: the accelerator, or its name or file; its PE lines decide the order of the weight indices.
        progress: told of every section.
        overwrite: whether an image that is there already may be replaced.
        emit_hex: also write every section as text for Verilog's $readmemh.

    Raises:
        InputError: the folder is no quantized model, is damaged or of an unsupported architecture, or `out` cannot be
            written.
    """
    quantized_folder, out = user_path(quantized_folder), user_path(out)
    if isinstance(target, str | Path):
        target = load_target(target)
    source = open_quantized(quantized_folder)
    files = {name: path for name in TOKENIZER_FILES if (path := quantized_folder / name).is_file()}
    digests = {name: digest_file(path) for name, path in files.items()}
    plan = plan_image(source, image_target(target), digests)
    with output_directory(out, MAP_NAME, overwrite=overwrite) as folder:
        write_image(folder / IMAGE_NAME, plan.drafts, progress)
        image = open_image(folder)
        for name, path in files.items():
            shutil.copyfile(path, folder / name)
        if emit_hex:
            _write_hex(image, folder / HEX_FOLDER, progress)
        write_json(folder / MAP_NAME, describe_image(image))
    return _summarise(out, image, plan)


def image_target(target: Target) -> ImageTarget:
    """What an image says of the accelerator that it is laid out for."""
    return ImageTarget(target.name, target.pe_line.count, target.pe_line.mac_tree_inputs)


def _write_hex(image: Image, folder: Path, progress: Progress) -> None:
    folder.mkdir()
    with progress.task("writing hex", len(image.sections), "sections") as task:
        for number, section in enumerate(image.sections):
            with (folder / f"{number:04}-{section.name}.hex").open("w", encoding="ascii", newline="\n") as file:
                file.writelines(hex_lines(image, section))
            task.advance()


def _summarise(out: Path, image: Image, plan: ImagePlan) -> CompileResult:
    sizes: Counter[str] = Counter()
    for section in image.sections:
        sizes[section.kind.name.lower()] += section.length
    return CompileResult(
        out=out,
        image=out / IMAGE_NAME,
        file_bytes=image.file_bytes,
        sections=len(image.sections),
        operations=len(plan.operations),
        section_bytes=dict(sizes),
    )
