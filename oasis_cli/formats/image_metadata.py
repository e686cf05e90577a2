"""What an image says in words: the model, the quantization, the target, and what it was made from (a JSON section)."""

import dataclasses
import json
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from oasis_cli.errors import InputError
from oasis_cli.formats.program import ModelShape

METADATA_VERSION: Final = 1
_STRICT: Final = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=_STRICT)
class TokenIds:
    """Special tokens of the model; None where it has none."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclass(frozen=True, config=_STRICT)
class ImageTarget:
    """The accelerator for which the weights were laid out: its name, lines, and inputs of each line's MAC tree."""

    name: str
    pe_lines: int
    mac_tree_inputs: int


@dataclass(frozen=True, config=_STRICT)
class ImageQuantization:
    """How the model was quantized; names and values as in the quantized folder's `quantization_config`."""

    method: str
    weight_bits: int
    act_bits: int
    outlier_fraction: float
    outlier_mode: str
    scale_kind: str
    codebook_grid: str


@dataclass(frozen=True, config=_STRICT)
class ImageMetadata:
    """The metadata section.

    Attributes:
        schema_version: of this block.
        tool_version: of the tool that compiled the image.
        architecture: class name of the model in transformers.
        shape: sizes of the model.
        token_ids: special tokens.
        rope: the rotary parameters as the model's configuration gives them.
        attention_window: tokens a position attends to at most, None for all.
        quantization: how the model was quantized.
        target: for which accelerator.
        created_from: digest of every file of the quantized folder that was read.
        files: digest of every file that belongs to the image and lies beside it (the tokenizer).
    """

    schema_version: int
    tool_version: str
    architecture: str
    shape: ModelShape
    token_ids: TokenIds
    rope: dict[str, Any]
    attention_window: int | None
    quantization: ImageQuantization
    target: ImageTarget
    created_from: dict[str, str]
    files: dict[str, str]


_ADAPTER: Final = TypeAdapter(ImageMetadata)


def encode_metadata(metadata: ImageMetadata) -> bytes:
    """Canonical JSON: sorted keys, no spaces, ASCII."""
    return json.dumps(dataclasses.asdict(metadata), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode_metadata(data: bytes, where: str) -> ImageMetadata:
    """Read a metadata section.

    Raises:
        InputError: not the JSON that `encode_metadata` writes, or of a newer version.
    """
    try:
        version = json.loads(data).get("schema_version")
        if isinstance(version, int) and version > METADATA_VERSION:
            raise InputError(
                f"{where}: metadata version {version}, this tool reads up to {METADATA_VERSION}; update oasis-cli"
            )
        return _ADAPTER.validate_json(data)
    except (ValueError, AttributeError, RecursionError) as error:  # a ValidationError is a ValueError
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "not a JSON object"
        raise InputError(f"{where}: damaged metadata ({reason}); run oasis compile again") from error
