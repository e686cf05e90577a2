"""Targets: Table II as data, what follows from it, and the refusal of impossible chips."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from oasis_cli.errors import InputError
from oasis_cli.hardware.target import Orizuru, Target, load_target, lut_bytes, target_names


@pytest.fixture(scope="module")
def paper_target() -> Target:
    return load_target("oasis-28nm")


@pytest.fixture
def paper_text() -> str:
    return (Path(load_target.__code__.co_filename).parent / "targets" / "oasis-28nm.yaml").read_text(encoding="utf-8")


def test_every_shipped_target_loads() -> None:
    assert target_names()
    for name in target_names():
        assert load_target(name).name == name


def test_table_2_geometry(paper_target: Target) -> None:
    line = paper_target.pe_line
    assert (line.count, line.concat_units, line.index_counters, line.counter_inputs) == (16, 4096, 32, 16)
    assert (line.mac_tree_inputs, line.macs, line.dequant_units) == (32, 8, 1)
    assert line.indices_per_cycle == 512


def test_orizuru_has_the_273_units_of_table_2(paper_target: Target) -> None:
    assert (paper_target.orizuru.units, paper_target.orizuru.levels) == (256 + 16 + 1, 3)


@pytest.mark.parametrize(
    ("leaves", "inputs", "units", "levels"), [(4096, 16, 273, 3), (256, 16, 17, 2), (64, 2, 63, 6), (512, 16, 35, 3)]
)
def test_orizuru_units_follow_from_its_leaves(leaves: int, inputs: int, units: int, levels: int) -> None:
    tree = Orizuru(leaves=leaves, unit_inputs=inputs)
    assert (tree.units, tree.levels) == (units, levels)


def test_rates_follow_from_the_counts(paper_target: Target) -> None:
    assert paper_target.dense_macs == 16 * (32 + 8)
    assert paper_target.compensation_macs == 16 * 8
    assert paper_target.clustering_values == 4
    assert paper_target.mac_tree_latency == 1 + 5  # multipliers, log2(32) adder levels
    assert paper_target.hbm_bytes_per_cycle == pytest.approx(2039e9 * 0.92 / 500e6)


def test_a_slow_dequantization_unit_holds_the_macs_back(paper_target: Target) -> None:
    slow = replace(paper_target, rates=replace(paper_target.rates, dequant_values=2))
    assert slow.compensation_macs == 16 * 2


def test_the_lut_of_two_4_bit_indices_is_256_entries_and_two_codebooks() -> None:
    assert lut_bytes(4, 4) == 2 * (256 + 16 + 16)


def test_an_unknown_target_names_the_nearest_and_all_that_ship() -> None:
    with pytest.raises(InputError, match=r"'oasis-28mn' is not known; did you mean oasis-28nm\? .*oasis-28nm"):
        load_target("oasis-28mn")


def test_a_target_is_read_from_a_path(tmp_path: Path, paper_text: str) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text(paper_text.replace("count: 16 ", "count: 32 "), encoding="utf-8")
    assert load_target(path).pe_line.count == 32


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.yaml"):
        load_target(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("before", "after", "key", "reason"),
    [
        ("count: 16 ", "count: 0 ", "pe_line.count", "greater than or equal to 1"),
        ("count: 16 ", "count: -4 ", "pe_line.count", "greater than or equal to 1"),
        ("count: 16 ", "count: 1.5 ", "pe_line.count", "integer"),
        ("count: 16 ", "count: sixteen ", "pe_line.count", "integer"),
        ("mac_tree_inputs: 32 ", "mac_tree_inputs: 24 ", "pe_line.mac_tree_inputs", "power of two"),
        ("unit_inputs: 16 ", "unit_inputs: 10 ", "orizuru.unit_inputs", "power of two"),
        ("leaves: 4096 ", "leaves: 4000 ", "orizuru.leaves", "power of two"),
        ("clock_mhz: 500 ", "clock_mhz: 0 ", "clock_mhz", "greater than 0"),
        ("bandwidth_gb_s: 2039 ", "bandwidth_gb_s: -1 ", "hbm.bandwidth_gb_s", "greater than 0"),
        ("efficiency: 0.92 ", "efficiency: 92 ", "hbm.efficiency", "less than or equal to 1"),
        ("output_buffer_bytes: 65536 ", "output_buffer_bytes: 32 ", "chip.output_buffer_bytes", "HBM burst of 64"),
        ("lut_bytes: 2048 ", "lut_bytes: 512 ", "chip.lut_bytes", "do not hold the LUT"),
        ("  macs: true", "  macs: false", "dense", None),
        ("idle_power_share: 0.0 ", "idle_power_share: 2 ", "costs.idle_power_share", "less than or equal to 1"),
        ("power_w: 9.28e-1", "power_w: -1", "costs.memory_controller.power_w", "greater than or equal to 0"),
        ("  count: 16 ", "  lines: 16 ", "pe_line.lines", "not a known key"),
    ],
)
def test_an_impossible_chip_names_key_and_reason(
    tmp_path: Path, paper_text: str, before: str, after: str, key: str, reason: str | None
) -> None:
    path = tmp_path / "bad.yaml"
    assert before in paper_text
    text = paper_text.replace(before, after, 1)
    if reason is None:
        text = text.replace("mac_trees: true", "mac_trees: false")
        reason = "mac_trees and macs are both false"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_target(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert key in message
    assert reason in message


def test_all_mistakes_are_listed_at_once(tmp_path: Path, paper_text: str) -> None:
    path = tmp_path / "bad.yaml"
    text = paper_text.replace("clock_mhz: 500 ", "clock_mhz: 0 ").replace("count: 16 ", "count: 0 ")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"clock_mhz.*pe_line\.count"):
        load_target(path)


def test_a_replaced_target_is_checked_too(paper_target: Target) -> None:
    with pytest.raises(ValidationError, match="power of two"):
        replace(paper_target.pe_line, mac_tree_inputs=12)


def test_a_fault_between_keys_is_said_without_a_place(tmp_path: Path, paper_text: str) -> None:
    """It has no line; the keys that it is between are in the sentence."""
    path = tmp_path / "small.yaml"
    text = re.sub(r"output_buffer_bytes: \d+", "output_buffer_bytes: 8", paper_text)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"small\.yaml: chip\.output_buffer_bytes: 8 bytes are less than"):
        load_target(path)
