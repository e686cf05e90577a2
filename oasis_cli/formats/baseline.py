"""A model quantized by a method that oasis is compared with: its `config.json` block (kind `baseline-model`).

Such a folder is for measuring, not for deploying: its weights have the values that the method gives them, but are
stored dense, in float32, and the accelerator cannot run it. Activations are rounded when the model runs.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from oasis_cli.errors import InputError
from oasis_cli.formats.manifest import check_version

BASELINE_QUANT_METHOD: Final = "oasis-baseline"
BASELINE_SCHEMA_VERSION: Final = 1
BASELINE_KIND: Final = "baseline-model"
AS_IT_IS: Final = 16
"""Bits that mean: not quantized."""

BaselineMethod = Literal["rtn", "smoothquant", "quarot", "atom", "mxfp4", "nvfp4"]
BASELINES: Final[tuple[BaselineMethod, ...]] = get_args(BaselineMethod)
NumberFormat = Literal["none", "integer", "mxfp4", "nvfp4"]


@dataclass(frozen=True)
class Rounding:
    """How a tensor is rounded along its K channels.

    Attributes:
        numbers: `none`, symmetric integers, or a block floating-point format, which has its own bits and groups.
        bits: of an integer.
        group: channels that share a scale; 0 for all of them.
        clip: share of the largest magnitude that the integers cover.
        wide_channels: so many channels, the last ones in the stored order, are kept as 8-bit integers with one scale.
    """

    numbers: NumberFormat = "none"
    bits: int = AS_IT_IS
    group: int = 0
    clip: float = 1.0
    wide_channels: int = 0

    @property
    def shown(self) -> str:
        """For people, such as `4 bits, groups of 128`."""
        if self.numbers != "integer":
            return "as it is" if self.numbers == "none" else self.numbers
        return f"{self.bits} bits" + (f", groups of {self.group}" if self.group else "")


@dataclass(frozen=True)
class BaselineLayer:
    """A quantized layer.

    Attributes:
        rotated: whether its input is rotated by a Hadamard matrix when the model runs.
        activations: how its input is rounded then.
        bits_a_weight: what the method stores a weight in, scales included.
    """

    rotated: bool
    activations: Rounding
    bits_a_weight: float


@dataclass(frozen=True)
class BaselineSpec:
    """What `config.json` says under `quantization_config`.

    Attributes:
        method: one of BASELINES.
        weight_bits: of a weight; 16 where weights are left as they are.
        act_bits: of an activation; 16 where activations are left as they are.
        layers: quantized layers by name.
    """

    method: BaselineMethod
    weight_bits: int
    act_bits: int
    layers: Mapping[str, BaselineLayer]

    def to_config(self) -> dict[str, Any]:
        """The JSON block."""
        block = dataclasses.asdict(self)
        return block | {"quant_method": BASELINE_QUANT_METHOD, "schema_version": BASELINE_SCHEMA_VERSION}

    @classmethod
    def from_config(cls, block: Mapping[str, Any], where: str) -> "BaselineSpec":
        """Read the JSON block back.

        Raises:
            InputError: another method's block, a newer schema, or a damaged field.
        """
        if block.get("quant_method") != BASELINE_QUANT_METHOD:
            raise InputError(f"{where}: not a model of a method to compare with; name one that oasis quantize wrote")
        check_version(block.get("schema_version"), BASELINE_SCHEMA_VERSION, where)
        try:
            layers = {name: _read_layer(entry) for name, entry in block["layers"].items()}
            spec = cls(block["method"], block["weight_bits"], block["act_bits"], layers)
            sound = spec.method in BASELINES and layers and _is_bits(spec.weight_bits) and _is_bits(spec.act_bits)
        except (KeyError, TypeError, AttributeError, ValueError):
            sound = False
        if not sound:
            raise InputError(f"{where}: damaged quantization_config; run oasis quantize again")
        return spec


def _read_layer(entry: Mapping[str, Any]) -> BaselineLayer:
    rounding = Rounding(**entry["activations"])
    sound = (
        rounding.numbers in get_args(NumberFormat)
        and _is_bits(rounding.bits)
        and all(type(size) is int and size >= 0 for size in (rounding.group, rounding.wide_channels))
        and isinstance(rounding.clip, float)
        and 0 < rounding.clip <= 1
        and isinstance(entry["rotated"], bool)
    )
    if not sound:
        raise ValueError(f"damaged layer {entry}")
    return BaselineLayer(entry["rotated"], rounding, float(entry["bits_a_weight"]))


def _is_bits(value: object) -> bool:
    return type(value) is int and 2 <= value <= AS_IT_IS
