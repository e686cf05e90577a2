"""How many PE lines does LLaMA-2-7B deserve? Cycles, speed, energy and area of designs that differ in nothing else.

Only the model's sizes are needed, so there are no weights and no tensor library, and the answer comes at once.

    python examples/design_space.py
    python examples/design_space.py --shape llama-2-13b --lines 8 16 --batch 4
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from oasis_cli import SimulationSettings, load_target, simulate_shape
from oasis_cli.hardware.target import Target
from oasis_cli.simulator.report import SimulationReport

COLUMNS = "{:>6} {:>18} {:>10} {:>14} {:>12} {:>10}"


def with_lines(target: Target, lines: int) -> Target:
    """The same chip with another number of PE lines; everything that follows from it follows by itself."""
    return replace(target, name=f"{target.name}-{lines}", pe_line=replace(target.pe_line, count=lines))


def explore(target: Target, shape_name: str, lines: list[int], batch: int, decode: int) -> Iterator[SimulationReport]:
    """One report a design: W4A4, 0.5 % outliers a side."""
    for count in lines:
        yield simulate_shape(shape_name, SimulationSettings(batch=batch, decode=decode), with_lines(target, count))


def main() -> None:
    """Print a row a design."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="oasis-28nm", help="the design to start from: a shipped one or a YAML file")
    parser.add_argument("--shape", default="llama-2-7b", help="a shipped model's sizes, or a YAML file")
    parser.add_argument("--lines", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--decode", type=int, default=2048, help="tokens to generate")
    options = parser.parse_args()

    target = load_target(options.target)
    print(f"{options.shape}, {options.decode} tokens, batch {options.batch}; memory {target.hbm.bandwidth_gb_s:g} GB/s")
    print(COLUMNS.format("lines", "cycles", "tokens/s", "waits for HBM", "core mJ/token", "mm2"))
    for report in explore(target, options.shape, options.lines, options.batch, options.decode):
        totals = report.to_json()["totals"]
        print(
            COLUMNS.format(
                report.target.rpartition("-")[2],
                f"{report.cycles:,}",
                f"{report.tokens_per_s:,.1f}",
                f"{totals['stalls']['hbm'] / report.cycles:.1%}",
                f"{totals['energy_core_per_token_pj'] / 1e9:.2f}",
                f"{report.chip.area_mm2:.2f}",
            )
        )


if __name__ == "__main__":
    main()
