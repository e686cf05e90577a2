"""Energy and area: Table II's powers times busy cycles, and its sums."""

from dataclasses import replace

import pytest

from oasis_cli.hardware.target import UNITS, load_target
from oasis_cli.simulator.area import chip_area
from oasis_cli.simulator.energy import energy_pj, idle_energy_pj
from oasis_cli.simulator.timing import Gemm, time_gemm

PAPER = load_target("oasis-28nm")
# Table II: watts of all instances on the chip
POWER_W = {
    "concat_unit": 16 * 8.36e-2,
    "weight_index_buffer": 16 * 1.69e-2,
    "index_counter": 16 * 6.14e-2,
    "dequant_unit": 16 * 6.11e-3,
    "mac_tree": 16 * 2.54e-1,
    "mac": 16 * 4.89e-2,
    "output_buffer": 2.68e-1,
    "activation_index_buffer": 6.71e-2,
    "lut": 8.38e-3,
    "clustering_unit": 2.90e-4,
    "orizuru": 2.73e-1,
    "error_calculation_unit": 6.40e-3,
    "functional_unit": 5.63e-1,
    "memory_controller": 9.28e-1,
}


def test_powers_are_those_of_table_2() -> None:
    assert PAPER.power_w == pytest.approx(POWER_W)


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_draws_its_power_while_it_works(unit: str) -> None:
    """1000 cycles at 500 MHz are 2 us."""
    energy = energy_pj({unit: 1000.0}, 0, PAPER)
    assert energy.pop(unit) == pytest.approx(POWER_W[unit] * 2e-6 * 1e12)
    assert not any(energy.values())


def test_the_memory_is_charged_by_the_bit() -> None:
    assert energy_pj({}, 1000, PAPER)["hbm"] == 8000 * 3.9
    dear = replace(PAPER, hbm=replace(PAPER.hbm, pj_per_bit=6.25))
    assert energy_pj({}, 1000, dear)["hbm"] == 8000 * 6.25


def test_a_slower_clock_makes_busy_cycles_longer() -> None:
    half = replace(PAPER, clock_mhz=250.0)
    assert energy_pj({"mac": 10.0}, 0, half)["mac"] == 2 * energy_pj({"mac": 10.0}, 0, PAPER)["mac"]


def test_idle_units_cost_nothing_by_default_and_all_at_a_share_of_one() -> None:
    busy = {"mac_tree": 600.0, "lut": 1500.0}
    assert idle_energy_pj(busy, 1000.0, PAPER) == 0
    leaky = replace(PAPER, costs=replace(PAPER.costs, idle_power_share=1.0))
    # a unit busy beyond the cycles has no idle ones
    expected = sum(POWER_W.values()) * 1000 - POWER_W["mac_tree"] * 600 - POWER_W["lut"] * 1000
    assert idle_energy_pj(busy, 1000.0, leaky) == pytest.approx(expected * 2e-9 * 1e12)


def test_busy_cycles_of_the_square_gemm() -> None:
    """1-4096-4096 with 21 outliers a side: 256 channels a line, 42 outliers of 32 cycles, a merge of 32."""
    busy = time_gemm(Gemm(1, 4096, 4096), PAPER, outliers=21).busy
    assert busy["concat_unit"] == 256
    assert busy["index_counter"] == busy["mac_tree"] == busy["lut"] == 2048
    assert busy["dequant_unit"] == 42 * 32
    assert busy["mac"] == 42 * 32 + 32
    assert busy["orizuru"] == 12 + 42 * 13
    assert busy["error_calculation_unit"] == 42
    assert busy["memory_controller"] == pytest.approx((4096 * 2048 + 42 * 2048 + 8768) / 3751.76)


def test_lines_without_a_channel_draw_nothing() -> None:
    """17 channels on 16 lines: two rounds, but 17/16 of a round's energy."""
    busy = time_gemm(Gemm(1, 4096, 17), PAPER).busy
    assert busy["mac_tree"] == 8 * 17 / 16
    assert busy["lut"] == 2 * 8


def test_area_and_power_beside_the_printed_totals() -> None:
    """The parts of Table II make 14.96 mm2 and 9.65 W, its last row says 15.31 and 9.66."""
    chip = chip_area(PAPER)
    assert chip.area_mm2 == pytest.approx(14.96, abs=5e-3)
    assert chip.power_w == pytest.approx(9.65, abs=5e-3)
    assert (chip.published_area_mm2, chip.published_power_w) == (15.31, 9.66)
    assert sum(row.area_mm2 for row in chip.units) == pytest.approx(chip.area_mm2)
    assert sum(row.power_w for row in chip.units) == pytest.approx(chip.power_w)
    assert [row.unit for row in chip.units] == list(UNITS)


def test_a_pe_line_adds_up_to_table_2() -> None:
    rows = {row.unit: row for row in chip_area(PAPER).units}
    line = ("concat_unit", "weight_index_buffer", "index_counter", "dequant_unit", "mac_tree", "mac")
    assert sum(rows[unit].area_mm2 for unit in line) == pytest.approx(9.08, abs=5e-3)
    assert sum(rows[unit].power_w for unit in line) == pytest.approx(7.54, abs=1e-2)


def test_area_and_power_scale_with_the_chip() -> None:
    double = replace(
        PAPER,
        pe_line=replace(PAPER.pe_line, count=32, macs=16),
        orizuru=replace(PAPER.orizuru, leaves=65536),
        published=None,
    )
    before, after = ({row.unit: row for row in chip_area(target).units} for target in (PAPER, double))
    assert after["concat_unit"].area_mm2 == pytest.approx(2 * before["concat_unit"].area_mm2)
    assert after["mac"].power_w == pytest.approx(4 * before["mac"].power_w)
    assert after["orizuru"].amount == 4096 + 273
    assert after["functional_unit"] == before["functional_unit"]
    assert chip_area(double).published_area_mm2 is None
