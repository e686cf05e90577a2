"""Energy: each unit's power while it works, and every bit that the memory moves."""

from collections.abc import Mapping

from oasis_cli.hardware.target import UNITS, Target

HBM = "hbm"
IDLE = "idle"


def energy_pj(busy: Mapping[str, float], hbm_bytes: float, target: Target) -> dict[str, float]:
    """Energy by unit, HBM included.

    Args:
        busy: cycles in which each unit works; absent means never.
        hbm_bytes: bytes moved by the HBM.
        target: its powers (Table II are those of full activity), clock and pJ a bit.
    """
    power = target.power_w
    # W / MHz is 1e-6 J, or 1e6 pJ, a cycle
    energy = {unit: power[unit] * busy.get(unit, 0.0) / target.clock_mhz * 1e6 for unit in UNITS}
    return energy | {HBM: 8 * hbm_bytes * target.hbm.pj_per_bit}


def idle_energy_pj(busy: Mapping[str, float], cycles: float, target: Target) -> float:
    """Energy of the units in the cycles in which they do not work: a share of their power, leakage and clock."""
    power, share = target.power_w, target.costs.idle_power_share
    idle = sum(power[unit] * max(0.0, cycles - busy.get(unit, 0.0)) for unit in UNITS)
    return share * idle / target.clock_mhz * 1e6
