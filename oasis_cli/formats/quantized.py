"""The quantized model folder: its `config.json` block, its tensors, its report (kind `quantized-model`).

A Hugging Face folder. A quantized layer P stores its packed indices as `P.weight`, uint8 [N, ceil(K/2)], so that a
loader which does not know the format meets a shape that cannot be right and refuses, instead of filling in noise.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import torch

from oasis_cli.errors import InputError
from oasis_cli.formats.manifest import check_version
from oasis_cli.formats.packing import packed_length
from oasis_cli.numerics.codebook import CodebookGrid
from oasis_cli.numerics.outlier_count import outlier_count
from oasis_cli.numerics.scale import SCALE_KINDS, ScaleKind

QUANT_METHOD: Final = "oasis"
SCHEMA_VERSION: Final = 1
KIND: Final = "quantized-model"
REPORT_NAME: Final = "quantization_report.json"
BITS: Final = (1, 2, 3, 4)
AS_IT_IS: Final = 16
"""Bits of activations that are not quantized."""
_BITS: Final = {"weight_bits": BITS, "act_bits": (*BITS, AS_IT_IS)}

OutlierMode = Literal["dynamic", "static", "none"]


@dataclass(frozen=True)
class LayerSpec:
    """Where a quantized layer stands.

    Attributes:
        site: the site whose activations it reads; layers of one site share codebook, scale and outliers.
        in_features: K.
        out_features: N.
        weight_bits: n_W of this layer.
        act_bits: n_A of its site; 16 where its activations are left as they are.
    """

    site: str
    in_features: int
    out_features: int
    weight_bits: int
    act_bits: int

    @property
    def quantizes_activations(self) -> bool:
        """Whether the layer's input is quantized too."""
        return self.act_bits < AS_IT_IS


@dataclass(frozen=True)
class CacheSpec:
    """How keys and values are kept for later tokens.

    Attributes:
        bits: of an index; one codebook a layer.
        head_dim: channels of a head; one scale a token and head.
    """

    bits: int
    head_dim: int


@dataclass(frozen=True)
class QuantizationSpec:
    """What `config.json` says under `quantization_config`: enough to build every layer before its tensors exist.

    Attributes:
        method: what chose the numbers (`oasis`, `oasis-s`).
        weight_bits: n_W of layers that say nothing else.
        act_bits: n_A of layers that say nothing else.
        outlier_fraction: outliers a side, as a share of K.
        outlier_mode: `dynamic` (the k largest and smallest of each token), `static` (thresholds), `none`.
        scale_kind: the token scale.
        codebook_grid: `int8` or `fp16`.
        layers: quantized layers by name.
        cache: how keys, before their rotation, and values are quantized; None where they are left as they are.
    """

    method: str
    weight_bits: int = 4
    act_bits: int = 4
    outlier_fraction: float = 0.005
    outlier_mode: OutlierMode = "dynamic"
    scale_kind: ScaleKind = "absmax"
    codebook_grid: CodebookGrid = "int8"
    layers: Mapping[str, LayerSpec] = field(default_factory=dict)
    cache: CacheSpec | None = None

    @property
    def shown_bits(self) -> str:
        """Such as `W4A4`, with the mean of what a weight's index takes where layers differ."""
        bits = f"W{self.weight_bits}A{self.act_bits}"
        if any(
            (layer.weight_bits, layer.act_bits) != (self.weight_bits, self.act_bits) for layer in self.layers.values()
        ):
            bits += " mixed"
        return bits if self.cache is None else f"{bits} KV{self.cache.bits}"

    def to_config(self) -> dict[str, Any]:
        """The JSON block."""
        block = dataclasses.asdict(self) | {"quant_method": QUANT_METHOD, "schema_version": SCHEMA_VERSION}
        block["layers"] = {name: self._entry(layer) for name, layer in self.layers.items()}
        if self.cache is None:
            del block["cache"]
        return block

    def _entry(self, layer: LayerSpec) -> dict[str, Any]:
        """A layer's entry: its bits stand there only where they are not the folder's."""
        entry = dataclasses.asdict(layer)
        return {key: value for key, value in entry.items() if key not in _BITS or value != getattr(self, key)}

    @classmethod
    def from_config(cls, block: Mapping[str, Any], where: str) -> "QuantizationSpec":
        """Read the JSON block back.

        Raises:
            InputError: another method's block, a newer schema, or a damaged field.
        """
        if block.get("quant_method") != QUANT_METHOD:
            raise InputError(f"{where}: quantized by {block.get('quant_method')!r}, not by oasis; name an oasis folder")
        check_version(block.get("schema_version"), SCHEMA_VERSION, where)
        problem = _problem(block)
        if problem:
            raise InputError(f"{where}: damaged quantization_config ({problem}); run oasis quantize again")
        layers = {
            name: LayerSpec(
                entry["site"],
                entry["in_features"],
                entry["out_features"],
                entry.get("weight_bits", block["weight_bits"]),
                entry.get("act_bits", block["act_bits"]),
            )
            for name, entry in block["layers"].items()
        }
        known = {f.name for f in dataclasses.fields(cls)} - {"layers", "cache"}
        cache = CacheSpec(**block["cache"]) if block.get("cache") else None
        return cls(**{name: block[name] for name in known}, layers=layers, cache=cache)

    def outliers_a_side(self, K: int) -> int:
        """Outliers a side of a token of K values; 0 unless outliers are dynamic."""
        return outlier_count(K, self.outlier_fraction) if self.outlier_mode == "dynamic" else 0


def _problem(block: Mapping[str, Any]) -> str | None:
    """The first thing that is wrong with a block, or None."""
    choices: dict[str, tuple[Any, ...]] = {
        **_BITS,
        "outlier_mode": get_args(OutlierMode),
        "scale_kind": SCALE_KINDS,
        "codebook_grid": get_args(CodebookGrid),
    }
    for name, allowed in choices.items():
        if not _among(block.get(name), allowed):
            return f"{name} is {block.get(name)!r}"
    if not isinstance(block.get("method"), str):
        return f"method is {block.get('method')!r}"
    fraction = block.get("outlier_fraction")
    if not isinstance(fraction, float | int) or isinstance(fraction, bool) or not 0 <= fraction <= 0.5:
        return f"outlier_fraction is {fraction!r}"
    layers = block.get("layers")
    if not isinstance(layers, dict) or not layers:
        return "no layers"
    for name, entry in layers.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("site"), str):
            return f"layer {name} names no site"
        sizes = entry.get("in_features"), entry.get("out_features")
        if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
            return f"layer {name} has sizes {sizes}"
        if odd := next(
            (key for key, allowed in _BITS.items() if not _among(entry.get(key, allowed[0]), allowed)), None
        ):
            return f"layer {name} has {odd} {entry[odd]!r}"
    return _cache_problem(block.get("cache"), layers)


def _cache_problem(cache: Any, layers: Mapping[str, Mapping[str, Any]]) -> str | None:
    if cache is None:
        return None
    sound = isinstance(cache, dict) and cache.keys() == {"bits", "head_dim"} and _among(cache["bits"], BITS)
    sound = sound and type(cache["head_dim"]) is int and cache["head_dim"] > 0
    if not sound or any(is_cached(name) and e["out_features"] % cache["head_dim"] for name, e in layers.items()):
        return f"cache is {cache!r}"
    return None


def is_cached(layer: str) -> bool:
    """Whether a layer's output goes into the cache of keys and values."""
    return layer.endswith(("k_proj", "v_proj"))


def _among(value: object, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is one of these, True not being 1."""
    return value in allowed and not isinstance(value, bool)


def declare_layer(
    name: str, spec: QuantizationSpec, bias: torch.dtype | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of a quantized layer's tensors.

    Args:
        name: the layer's module name, a key of `spec.layers`.
        spec: the folder's specification.
        bias: dtype of its bias, None where it has none.
    """
    layer = spec.layers[name]
    K, N = layer.in_features, layer.out_features
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        f"{name}.weight": ((N, packed_length(K)), torch.uint8),
        f"{name}.weight_codebook": ((2**layer.weight_bits,), torch.float16),
        f"{name}.weight_scale": ((N,), torch.float16),
        f"{name}.codebook_steps": ((2,), torch.float32),
    }
    if layer.quantizes_activations:
        tensors[f"{name}.act_codebook"] = ((2**layer.act_bits,), torch.float16)
        if spec.outlier_mode == "static":
            tensors[f"{name}.act_thresholds"] = ((2,), torch.float32)
    if spec.cache is not None and is_cached(name):
        tensors[f"{name}.cache_codebook"] = ((2**spec.cache.bits,), torch.float16)
    if bias is not None:
        tensors[f"{name}.bias"] = ((N,), bias)
    return tensors
