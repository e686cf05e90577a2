"""Can a reader be written from docs/quantized-format.md and docs/numerics.md alone? This one knows nothing else.

It takes names, types and shapes from the tables of the page, and computes with NumPy.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from oasis_cli import QuantizationSettings, load, open_checkpoint, quantize
from tests.conftest import Chain

PAGE = Path(__file__).parents[1] / "docs" / "quantized-format.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: these tests look at a checkout")

DTYPES = {"U8": "u1", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
Array = npt.NDArray[Any]


class Declared(NamedTuple):
    """A row of one of the page's tables of tensors."""

    name: str
    dtype: str
    shape: str
    content: str


def declared(symbol: str) -> Iterator[Declared]:
    """Rows of the table whose tensors are named after `symbol`: S for a site, P for a layer."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and re.match(rf"`{symbol}[./]", cells[0]):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                yield Declared(name[1:], *cells[1:])


def shape_of(row: Declared, **sizes: int) -> tuple[int, ...]:
    return tuple(eval(row.shape.replace("^", "**"), {"ceil": math.ceil, **sizes}))


def read_safetensors(path: Path) -> dict[str, Array]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(data) - start
    return {
        name: np.frombuffer(
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], DTYPES[kind]
        ).reshape(entry["shape"])
        for name, entry in header.items()
        if (kind := entry["dtype"]) in DTYPES
    }


def digest(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def outlier_count(K: int, fraction: float) -> int:
    return min(int((Decimal(str(fraction)) * K).to_integral_value(ROUND_CEILING)), K // 2)


@pytest.fixture(scope="module", params=["oasis int8", "oasis-s fp16"])
def folder(request: pytest.FixtureRequest, chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "oasis int8":
        return chain.quantized
    out = tmp_path_factory.mktemp("static") / "quantized"
    options = QuantizationSettings(method="oasis-s", codebook_grid="fp16", act_bits=3)
    return quantize(open_checkpoint(chain.model), out, chain.calibration, options).folder


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, Array]:
    index = read_json(folder / "model.safetensors.index.json")
    found = {name: read_safetensors(folder / name) for name in sorted(set(index["weight_map"].values()))}
    flat = {name: array for file in found.values() for name, array in file.items()}
    assert index["weight_map"] == {name: file for file, arrays in found.items() for name in arrays}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in flat.values())
    return flat


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / "config.json")["quantization_config"]
    return found


def test_every_tensor_is_as_the_table_says(tensors: dict[str, Array], config: dict[str, Any]) -> None:
    expected = {}
    for layer, sizes in config["layers"].items():
        for row in declared("P"):
            if row.name in (".bias", ".cache_codebook") or (
                row.name == ".act_thresholds" and config["outlier_mode"] != "static"
            ):
                continue  # the toy has no biases, and its cache is left as it is
            known = {"K": sizes["in_features"], "N": sizes["out_features"]}
            bits = {"n_W": config["weight_bits"], "n_A": config["act_bits"]}
            expected[layer + row.name] = (DTYPES[row.dtype], shape_of(row, **known, **bits))
    assert len(expected) == len(config["layers"]) * (6 if config["outlier_mode"] == "static" else 5)
    found = {name: (array.dtype.str.replace("|", ""), array.shape) for name, array in tensors.items()}
    assert {name: found[name] for name in expected} == expected


def test_every_key_of_the_configuration_is_explained(config: dict[str, Any]) -> None:
    _, _, block = PAGE.read_text(encoding="utf-8").partition("### `quantization_config`")
    table = block.partition("### ")[0]
    assert {name for row in re.findall(r"^\| ([^|]+)\|", table, re.M) for name in re.findall(r"`(\w+)`", row)} == set(
        config
    )


def unpack(packed: Array, K: int) -> Array:
    """Low nibble first."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)[:, :K]


def test_packing_is_that_of_the_example() -> None:
    examples = re.findall(r"indices ([\d ]+?) +bytes ([0-9a-f ]+)", PAGE.read_text(encoding="utf-8"))
    assert len(examples) == 2
    for indices, packed in examples:
        row = np.frombuffer(bytes.fromhex(packed), "u1")[None]
        assert unpack(row, 5).tolist() == [[int(index) for index in indices.split()]]


def test_weights_have_the_error_that_the_report_says(
    chain: Chain, folder: Path, tensors: dict[str, Array], config: dict[str, Any]
) -> None:
    report = read_json(folder / "quantization_report.json")
    original = read_safetensors(chain.model / "model.safetensors")
    for layer, sizes in config["layers"].items():
        index = unpack(tensors[f"{layer}.weight"], sizes["in_features"])
        scale, codebook = (tensors[f"{layer}.weight_{part}"].astype("f8") for part in ("scale", "codebook"))
        weight = original[f"{layer}.weight"].astype("f8")
        error = ((weight - scale[:, None] * codebook[index]) ** 2).sum() / (weight**2).sum()
        assert report["layers"][layer]["relative_error"] == pytest.approx(error, rel=1e-5)


def layer_output(x: Array, layer: str, tensors: dict[str, Array], config: dict[str, Any]) -> Array:
    """docs/numerics.md, sections 2 to 6, for `absmax`; every step in float32 unless it says otherwise."""
    get = {row.name[1:]: tensors[layer + row.name] for row in declared("P") if layer + row.name in tensors}
    K = x.shape[1]
    act, weight, steps = get["act_codebook"], get["weight_codebook"], get["codebook_steps"].astype("f8")
    j = unpack(get["weight"], K)
    scale = np.abs(x).max(axis=1)
    boundaries = ((act[1:].astype("f8") + act[:-1]) / 2).astype("f4")
    i = (scale[:, None, None] * boundaries <= x[:, :, None]).sum(axis=2)

    outliers = np.zeros(x.shape, bool)
    if config["outlier_mode"] == "static":
        lower, upper = get["act_thresholds"]
        outliers = (x < lower) | (x > upper)
    else:
        k = outlier_count(K, config["outlier_fraction"])
        for row, mask in zip(x, outliers, strict=True):
            mask[np.lexsort((np.arange(K), -row))[:k]] = True
            mask[np.lexsort((np.arange(K), row))[:k]] = True
    residual = np.where(outliers, x - scale[:, None] * act.astype("f4")[i], np.float32(0))

    if config["codebook_grid"] == "int8":
        integers = [np.rint(codebook / step).astype("i8") for codebook, step in ((weight, steps[0]), (act, steps[1]))]
        assert all(np.abs(found).max() <= 127 for found in integers)
        main = ((integers[1][i] @ integers[0][j].T) * (steps[0] * steps[1])).astype("f4")
    else:
        lut = (act.astype("f8")[:, None] * weight.astype("f8")).astype("f2").astype("f8")
        main = np.stack([lut[token[:, None], j.T].sum(axis=0) for token in i]).astype("f4")
    compensation = (residual.astype("f8") @ weight.astype("f8")[j].T).astype("f4")
    y: Array = (scale[:, None] * main + compensation) * get["weight_scale"].astype("f4")
    return y


def test_layers_compute_what_the_pages_say(folder: Path, tensors: dict[str, Array], config: dict[str, Any]) -> None:
    """To the bit, with tokens that are ordinary, wild, constant and zero."""
    model = load(folder)
    rng = np.random.default_rng(5)
    for layer in ("model.layers.0.self_attn.k_proj", "model.layers.2.mlp.down_proj"):
        K = config["layers"][layer]["in_features"]
        x = rng.standard_normal((5, K)).astype("f4")
        x[1] = x[1] ** 5
        x[2], x[3] = 2.5, 0
        expected = layer_output(x, layer, tensors, config)
        found = model.get_submodule(layer)(torch.from_numpy(x)).numpy()
        assert np.array_equal(found, expected)
        assert not found[3].any()


def test_digests_are_as_the_page_says(chain: Chain, folder: Path) -> None:
    report, calibration = (
        read_json(folder / "quantization_report.json"),
        read_json(chain.calibration / "calibration.json"),
    )
    assert (report["kind"], calibration["kind"]) == ("quantized-model", "calibration")
    assert report["schema_version"] == calibration["schema_version"] == 1
    files = {path.name: digest(path) for path in folder.iterdir()}
    assert report["files"] == {
        name: value for name, value in files.items() if name not in ("quantization_report.json", "README.md")
    }
    pairs = [[name, digest(chain.model / name)] for name in ("config.json", "model.safetensors")]
    model = "sha256:" + hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    stored = digest(chain.calibration / "calibration.safetensors")
    assert report["created_from"] == {"model": model, "calibration": stored}
    assert calibration["created_from"]["model"] == model
    assert calibration["tensors_digest"] == stored


@pytest.mark.parametrize("name", ["calibration/calibration.json", "quantized/quantization_report.json"])
def test_a_manifest_holds_its_own_digest(chain: Chain, name: str) -> None:
    text = (chain.quantized.parent / name).read_text(encoding="ascii")
    stored = json.loads(text)["manifest_digest"]
    text = text.replace(f'"manifest_digest": "{stored}"', '"manifest_digest": ""')
    assert stored == "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_the_calibration_is_as_the_page_says(chain: Chain) -> None:
    manifest = read_json(chain.calibration / "calibration.json")
    tensors = read_safetensors(chain.calibration / "calibration.safetensors")
    assert len(tensors) == len(manifest["sites"]) * len(list(declared("S")))
    for site, entry in manifest["sites"].items():
        n = len(tensors[f"{site}/points"])
        for row in declared("S"):
            array = tensors[site + row.name]
            assert (array.dtype.str, array.shape) == (DTYPES[row.dtype], shape_of(row, n=n, K=entry["K"]))
        for bits in (1, 2, 3, 4):
            assert (np.diff(tensors[f"{site}/centroids.{bits}"]) >= 0).all()
        assert (np.diff(tensors[f"{site}/points"]) > 0).all()
        assert (tensors[f"{site}/weights"] > 0).all()
        assert tensors[f"{site}/thresholds"].tolist() == [
            np.float32(entry["threshold"][end]) for end in ("lower", "upper")
        ]
        parents = {layer.rpartition(".")[0] for layer in entry["layers"]}
        assert site == f"{parents.pop()}." + "+".join(layer.rpartition(".")[2] for layer in entry["layers"])
    page = PAGE.read_text(encoding="utf-8")
    for key in (*manifest, *entry, *entry["kmeans"]["4"], *entry["scale"]):
        assert f"`{key}`" in page, key


def test_every_key_of_the_report_is_explained(folder: Path) -> None:
    report = read_json(folder / "quantization_report.json")
    page = PAGE.read_text(encoding="utf-8")
    for key in (*report, *next(iter(report["layers"].values())), *report["totals"]):
        assert f"`{key}`" in page, key
