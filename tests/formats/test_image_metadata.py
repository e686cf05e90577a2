"""Does the metadata come back as it was, and is anything else refused?"""

import json
from typing import Any

import pytest

from oasis_cli.errors import InputError
from oasis_cli.formats.image_metadata import (
    ImageMetadata,
    ImageQuantization,
    ImageTarget,
    TokenIds,
    decode_metadata,
    encode_metadata,
)
from oasis_cli.formats.program import ModelShape

METADATA = ImageMetadata(
    schema_version=1,
    tool_version="1.2.3",
    architecture="LlamaForCausalLM",
    shape=ModelShape("llama", hidden=8, intermediate=9, blocks=1, heads=2, kv_heads=1, head_dim=4, vocab=11),
    token_ids=TokenIds(bos=1, eos=(2, 3)),
    rope={"rope_type": "default", "rope_theta": 10000.0},
    attention_window=None,
    quantization=ImageQuantization("oasis", 4, 4, 0.005, "dynamic", "absmax", "int8"),
    target=ImageTarget("oasis-28nm", 16, 32),
    created_from={"config.json": "sha256:00"},
    files={},
)


def test_metadata_round_trips() -> None:
    data = encode_metadata(METADATA)
    assert decode_metadata(data, "here") == METADATA
    assert data.startswith(b'{"architecture":"LlamaForCausalLM","attention_window":null,')


def _changed(**changes: Any) -> bytes:
    return json.dumps(json.loads(encode_metadata(METADATA)) | changes).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1]",
        b"\xff",
        b"{}",
        b"[" * 100_000,
        _changed(extra=1),
        _changed(attention_window="many"),
        _changed(schema_version="1"),
        _changed(target={"name": "x"}),
        _changed(shape={"name": "x"}),
        _changed(shape=json.loads(encode_metadata(METADATA))["shape"] | {"hidden": 0}),
    ],
)
def test_other_json_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match=r"^here: damaged metadata \(.*\); run oasis compile again$"):
        decode_metadata(data, "here")


def test_a_newer_version_is_refused_clearly() -> None:
    with pytest.raises(InputError, match="metadata version 2, this tool reads up to 1; update oasis-cli"):
        decode_metadata(_changed(schema_version=2, unheard_of=True), "here")
