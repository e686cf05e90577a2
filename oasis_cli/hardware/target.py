"""The accelerator as frozen settings: Table II, the memory behind it, and the rates that the paper leaves open.

The numbers live in `targets/*.yaml`, each with its source; what follows from them is a property here.
"""

import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from oasis_cli.config import STRICT, load_yaml
from oasis_cli.hardware.shipped import find_file, shipped_names

FP16_BYTES = 2
_FOLDER = Path(__file__).parent / "targets"


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"a tree needs a power of two, got {value}")
    return value


Count = Annotated[int, Field(ge=1)]
Tree = Annotated[int, Field(ge=2), AfterValidator(_power_of_two)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=STRICT)
class PELine:
    """The PE lines (§IV-A); every amount is for one line, `count` lines work side by side on N.

    Attributes:
        count: lines on the chip.
        concat_units: index pairs that one pass holds.
        index_bits: width of a stored index, at each input of a Concat Unit.
        weight_index_buffer_bytes: weight indices that wait for the Concat Units.
        index_counters: Index Counters.
        counter_inputs: index pairs that one counter takes a cycle.
        dequant_units: Dequantization Units.
        mac_tree_inputs: products that the MAC Tree sums a cycle.
        macs: MAC Units of the outlier branch.
    """

    count: Count
    concat_units: Count
    index_bits: Annotated[int, Field(ge=1, le=8)]
    weight_index_buffer_bytes: Count
    index_counters: Count
    counter_inputs: Count
    dequant_units: Count
    mac_tree_inputs: Tree
    macs: Count

    @property
    def indices_per_cycle(self) -> int:
        """Index pairs that a line counts in one cycle."""
        return self.index_counters * self.counter_inputs


@dataclass(frozen=True, config=STRICT)
class Chip:
    """What the PE lines share (§IV-A)."""

    output_buffer_bytes: Count
    activation_index_buffer_bytes: Count
    lut_bytes: Count
    clustering_units: Count
    error_calculation_units: Count
    functional_units: Count
    memory_controllers: Count


@dataclass(frozen=True, config=STRICT)
class Orizuru:
    """The outlier search (§IV-D): a tree of units, each a small tree itself.

    Attributes:
        leaves: activations that the tree holds at once.
        unit_inputs: inputs of one unit.
    """

    leaves: Tree
    unit_inputs: Tree

    @property
    def levels(self) -> int:
        """Levels of units between the leaves and the root."""
        levels, width = 0, self.leaves
        while width > 1:
            levels, width = levels + 1, math.ceil(width / self.unit_inputs)
        return levels

    @property
    def units(self) -> int:
        """Units of all levels together: 256 + 16 + 1 for 4096 leaves and 16 inputs."""
        units, width = 0, self.leaves
        while width > 1:
            width = math.ceil(width / self.unit_inputs)
            units += width
        return units


@dataclass(frozen=True, config=STRICT)
class Hbm:
    """The memory that holds weights and KV cache.

    Attributes:
        bandwidth_gb_s: peak, 1e9 bytes a second.
        efficiency: share of the peak that a sequential stream reaches.
        burst_bytes: smallest transfer.
        pj_per_bit: energy of one bit moved, core and interface.
    """

    bandwidth_gb_s: Positive
    efficiency: Annotated[float, Field(gt=0, le=1)]
    burst_bytes: Count
    pj_per_bit: NotNegative


@dataclass(frozen=True, config=STRICT)
class Rates:
    """How fast the units run where the paper gives no rate.

    Attributes:
        clustering_values: activations that a Clustering Unit maps a cycle.
        dequant_values: weight indices that a Dequantization Unit maps a cycle.
        functional_elements: elements that the Functional Unit takes a cycle, in one pass.
        norm_passes: passes of a norm over its input.
        scale_passes: passes of the token scale.
        softmax_passes: passes of a softmax.
        rope_passes: passes of a rotary embedding.
        activation_passes: passes of an activation function; a gate's product is one more.
        add_passes: passes of an addition.
        concat_cycles: latency of the Concat Units.
        mac_tree_level_cycles: latency of one level of the MAC Tree, its multipliers being a level.
        orizuru_level_cycles: latency of one comparison level of the outlier search.
        merge_cycles: latency of adding the two branches of one output channel.
    """

    clustering_values: Count
    dequant_values: Count
    functional_elements: Count
    norm_passes: Count
    scale_passes: Annotated[int, Field(ge=0)]
    softmax_passes: Count
    rope_passes: Count
    activation_passes: Count
    add_passes: Count
    concat_cycles: Count
    mac_tree_level_cycles: Count
    orizuru_level_cycles: Count
    merge_cycles: Count


@dataclass(frozen=True, config=STRICT)
class Dense:
    """Where products of two FP16 numbers run: attention's QK^T and PV, and the output head.

    Attributes:
        mac_trees: whether the MAC Trees take part.
        macs: whether the MAC Units take part.
        weight_bits: bits of a dense weight in HBM.
        kv_cache_bits: bits of a cached key or value channel in HBM.
    """

    mac_trees: bool
    macs: bool
    weight_bits: Count
    kv_cache_bits: Count

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        if not (self.mac_trees or self.macs):
            raise ValueError("mac_trees and macs are both false, so FP16 products would have no unit to run on")
        return self


@dataclass(frozen=True, config=STRICT)
class Schedule:
    """What overlaps with what.

    Attributes:
        overlap: vector work (clustering, scales, norms, softmax, ...) hides behind the matrix work before it.
        look_ahead: the outlier search runs beside the main branch (§III-C); False is the paper's OASIS-C.
        outlier_columns_from_hbm: the weight columns of outliers are fetched from an input-channel-major copy in HBM.
    """

    overlap: bool
    look_ahead: bool
    outlier_columns_from_hbm: bool


@dataclass(frozen=True, config=STRICT)
class UnitCost:
    """Area and full-activity power of `per` instances (inputs, bytes) of a unit; other amounts scale linearly."""

    per: Count
    area_mm2: NotNegative
    power_w: NotNegative


@dataclass(frozen=True, config=STRICT)
class Costs:
    """Area and power of every unit, in the order of Table II."""

    concat_unit: UnitCost
    weight_index_buffer: UnitCost
    index_counter: UnitCost
    dequant_unit: UnitCost
    mac_tree: UnitCost
    mac: UnitCost
    output_buffer: UnitCost
    activation_index_buffer: UnitCost
    lut: UnitCost
    clustering_unit: UnitCost
    orizuru: UnitCost
    error_calculation_unit: UnitCost
    functional_unit: UnitCost
    memory_controller: UnitCost
    idle_power_share: Annotated[float, Field(ge=0, le=1)]


UNITS: tuple[str, ...] = tuple(field.name for field in fields(Costs) if field.name != "idle_power_share")


@dataclass(frozen=True, config=STRICT)
class Published:
    """Totals as printed by the source of a target, to set beside the sums."""

    area_mm2: Positive
    power_w: Positive


@dataclass(frozen=True, config=STRICT)
class Target:
    """One accelerator.

    Raises:
        pydantic.ValidationError: a value that no accelerator can have; `load_target` turns it into an InputError.
    """

    name: str
    clock_mhz: Positive
    pe_line: PELine
    chip: Chip
    orizuru: Orizuru
    hbm: Hbm
    rates: Rates
    dense: Dense
    schedule: Schedule
    costs: Costs
    published: Published | None = None

    @model_validator(mode="after")
    def _buffers_hold_what_they_must(self) -> Self:
        burst, line, chip = self.hbm.burst_bytes, self.pe_line, self.chip
        buffers = {
            "pe_line.weight_index_buffer_bytes": line.weight_index_buffer_bytes,
            "chip.output_buffer_bytes": chip.output_buffer_bytes,
            "chip.activation_index_buffer_bytes": chip.activation_index_buffer_bytes,
            "chip.lut_bytes": chip.lut_bytes,
        }
        faults = [
            f"{key}: {size} bytes are less than one HBM burst of {burst}; raise it or lower hbm.burst_bytes"
            for key, size in buffers.items()
            if size < burst
        ]
        needed = lut_bytes(line.index_bits, line.index_bits)
        if chip.lut_bytes < needed:
            faults.append(
                f"chip.lut_bytes: {chip.lut_bytes} bytes do not hold the LUT and codebooks of two "
                f"{line.index_bits}-bit indices ({needed} bytes); raise it or lower pe_line.index_bits"
            )
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def hbm_bytes_per_cycle(self) -> float:
        """What the memory delivers in one clock cycle of the chip, as a stream."""
        return self.hbm.bandwidth_gb_s * 1e9 * self.hbm.efficiency / (self.clock_mhz * 1e6)

    @property
    def compensation_macs(self) -> int:
        """Output channels that the outlier branch advances a cycle, all lines together."""
        line = self.pe_line
        return line.count * min(line.macs, line.dequant_units * self.rates.dequant_values)

    @property
    def dense_macs(self) -> int:
        """FP16 products a cycle, all lines together."""
        line = self.pe_line
        return line.count * (line.mac_tree_inputs * self.dense.mac_trees + line.macs * self.dense.macs)

    @property
    def clustering_values(self) -> int:
        """Activations clustered a cycle."""
        return self.chip.clustering_units * self.rates.clustering_values

    @property
    def functional_elements(self) -> int:
        """Elements that the Functional Units take a cycle, in one pass."""
        return self.chip.functional_units * self.rates.functional_elements

    @property
    def mac_tree_latency(self) -> int:
        """Cycles from a product's operands to the sum: the multipliers and every adder level."""
        return self.rates.mac_tree_level_cycles * (1 + self.pe_line.mac_tree_inputs.bit_length() - 1)

    @property
    def amounts(self) -> dict[str, int]:
        """How much of every unit the chip has, in the measure of its `UnitCost.per`."""
        line, chip = self.pe_line, self.chip
        return {
            "concat_unit": line.count * line.concat_units,
            "weight_index_buffer": line.count * line.weight_index_buffer_bytes,
            "index_counter": line.count * line.indices_per_cycle,
            "dequant_unit": line.count * line.dequant_units,
            "mac_tree": line.count * line.mac_tree_inputs,
            "mac": line.count * line.macs,
            "output_buffer": chip.output_buffer_bytes,
            "activation_index_buffer": chip.activation_index_buffer_bytes,
            "lut": chip.lut_bytes,
            "clustering_unit": chip.clustering_units,
            "orizuru": self.orizuru.units,
            "error_calculation_unit": chip.error_calculation_units,
            "functional_unit": chip.functional_units,
            "memory_controller": chip.memory_controllers,
        }

    @property
    def area_mm2(self) -> dict[str, float]:
        """Area of every unit on the chip."""
        return {unit: self._cost(unit).area_mm2 * n / self._cost(unit).per for unit, n in self.amounts.items()}

    @property
    def power_w(self) -> dict[str, float]:
        """Power of every unit on the chip while it works."""
        return {unit: self._cost(unit).power_w * n / self._cost(unit).per for unit, n in self.amounts.items()}

    def _cost(self, unit: str) -> UnitCost:
        cost: UnitCost = getattr(self.costs, unit)
        return cost


def lut_bytes(weight_bits: int, act_bits: int) -> int:
    """Bytes of one matrix's LUT and its two codebooks, FP16 (§IV-A: the LUT stores the codebooks too)."""
    weight_entries: int = 2**weight_bits
    act_entries: int = 2**act_bits
    return FP16_BYTES * (weight_entries * act_entries + weight_entries + act_entries)


def target_names() -> tuple[str, ...]:
    """Names of the shipped targets."""
    return shipped_names(_FOLDER)


def load_target(name: str | Path) -> Target:
    """The accelerator called `name`, or described by the YAML file at that path.

    Raises:
        InputError: nothing of that name, or a file that describes no possible accelerator.
    """
    return load_yaml(find_file(name, _FOLDER, "target"), Target)
