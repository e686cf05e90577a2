"""Model shapes: sizes that make the parameter counts everybody knows."""

from pathlib import Path

import pytest

from oasis_cli.errors import InputError
from oasis_cli.formats.program import ModelShape
from oasis_cli.hardware.shapes import load_shape, shape_names

# billions of parameters, as the models' papers and cards state them
PARAMETERS = {
    "llama-7b": 6.738,
    "llama-13b": 13.016,
    "llama-30b": 32.529,
    "llama-2-7b": 6.738,
    "llama-2-13b": 13.016,
    "llama-2-70b": 68.977,
    "llama-3-8b": 8.030,
    "mistral-7b": 7.242,
    "opt-6.7b": 6.658,
    "opt-13b": 12.853,
    "opt-30b": 29.974,
    "smollm2-135m": 0.1345,
}


def _linear_parameters(shape: ModelShape) -> int:
    attention = 2 * shape.hidden * (shape.attention_width + shape.kv_width)
    return shape.blocks * (attention + (2 + shape.glu) * shape.hidden * shape.intermediate)


def test_all_models_of_the_paper_ship() -> None:
    assert set(shape_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_the_sizes_add_up_to_the_known_parameters(name: str) -> None:
    shape = load_shape(name)
    assert shape.name == name
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    # norms, biases and position tables are left out: below half a percent
    assert _linear_parameters(shape) + embeddings == pytest.approx(PARAMETERS[name] * 1e9, rel=5e-3)


def test_an_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"did you mean llama-2-70b\?"):
        load_shape("llama2-70b")


def test_a_shape_is_read_from_a_path(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "name: own\nhidden: 64\nintermediate: 96\nblocks: 2\nheads: 4\nkv_heads: 2\nhead_dim: 16\nvocab: 100\n",
        encoding="utf-8",
    )
    assert load_shape(path) == ModelShape("own", 64, 96, 2, 4, 2, 16, 100)


@pytest.mark.parametrize(
    ("line", "reason"),
    [("blocks: 0", "blocks must be positive"), ("heads: 3", "do not divide"), ("hiden: 1", "did you mean hidden")],
)
def test_an_impossible_shape_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    sizes = {"hidden": 64, "intermediate": 96, "blocks": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 9}
    key, value = line.split(": ")
    path = tmp_path / "bad.yaml"
    lines = ["name: bad", *(f"{k}: {v}" for k, v in (sizes | {key: int(value)}).items())]
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(InputError, match=reason):
        load_shape(path)
