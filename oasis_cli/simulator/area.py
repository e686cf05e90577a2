"""Area and power of the chip: Table II as sums of its parts, the printed totals beside them."""

from dataclasses import dataclass

from oasis_cli.hardware.target import UNITS, Target


@dataclass(frozen=True)
class UnitArea:
    """One row: all instances of a unit on the chip.

    Attributes:
        unit: its name, as in energy and busy figures.
        amount: how much of it there is, in the measure of the target's costs (units, inputs, bytes).
        area_mm2: area of them all.
        power_w: power while they all work.
    """

    unit: str
    amount: int
    area_mm2: float
    power_w: float


@dataclass(frozen=True)
class ChipArea:
    """The whole chip.

    Attributes:
        units: rows in the order of Table II.
        area_mm2: their sum.
        power_w: their sum.
        published_area_mm2: the total that the target's source prints, None where it prints none.
        published_power_w: likewise.
    """

    units: tuple[UnitArea, ...]
    area_mm2: float
    power_w: float
    published_area_mm2: float | None
    published_power_w: float | None


def chip_area(target: Target) -> ChipArea:
    """Add up the chip of `target`."""
    amounts, area, power = target.amounts, target.area_mm2, target.power_w
    return ChipArea(
        units=tuple(UnitArea(unit, amounts[unit], area[unit], power[unit]) for unit in UNITS),
        area_mm2=sum(area.values()),
        power_w=sum(power.values()),
        published_area_mm2=target.published.area_mm2 if target.published else None,
        published_power_w=target.published.power_w if target.published else None,
    )
