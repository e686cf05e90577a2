"""Tables of a simulation, for `simulate` and `demo`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from oasis_cli.cli.render import show_pairs, show_table

if TYPE_CHECKING:
    from oasis_cli.pipeline.simulating import FunctionalResult
    from oasis_cli.simulator.report import SimulationReport


def energy(picojoules: float) -> str:
    """An energy for people."""
    for unit, size in (("J", 1e12), ("mJ", 1e9), ("uJ", 1e6), ("nJ", 1e3)):
        if picojoules >= size:
            return f"{picojoules / size:,.2f} {unit}"
    return f"{picojoules:,.0f} pJ"


def show_simulation(report: "SimulationReport") -> None:
    """Layers of a block, what the cycles went to, and the totals."""
    result = report.to_json()
    decode = [layer for layer in report.operations if layer.phase == report.operations[0].phase]
    show_table(
        f"Linear layers of a block, {decode[0].phase}, one execution",
        ["layer", "M x K x N", "cycles", "main", "outliers", "HBM", "energy"],
        [
            [
                layer.name.rsplit(".", 1)[-1],
                f"{layer.M} x {layer.K} x {layer.N}",
                f"{layer.cycles:,}",
                f"{layer.main_cycles:,}",
                f"{layer.outlier_cycles:,}",
                f"{layer.hbm_cycles:,}",
                energy(sum(layer.energy_pj.values())),
            ]
            for layer in decode
        ],
        numeric=range(2, 7),
    )
    totals = result["totals"]
    show_table(
        f"Where {report.cycles:,} cycles went",
        ["cause", "cycles", "share"],
        _shares(totals["work"] | {f"stall: {cause}": cycles for cause, cycles in totals["stalls"].items()}),
        numeric=[1, 2],
    )
    show_table("Bytes by buffer", ["buffer", "bytes", "share"], _shares(totals["bytes"]), numeric=[1, 2])
    show_table(
        "Energy by unit",
        ["unit", "energy", "share"],
        [[name, energy(float(value.replace(",", ""))), share] for name, value, share in _shares(totals["energy_pj"])],
        numeric=[1, 2],
    )
    show_pairs(f"{report.model} on {report.target} ({report.clock_mhz:g} MHz)", summary(report))


def summary(report: "SimulationReport") -> dict[str, str]:
    """The totals in words."""
    totals = report.to_json()["totals"]
    pairs = {
        "tokens": f"batch {report.batch}, prompt {report.prefill}, generated {report.decode}",
        "time": f"{report.seconds:.4g} s; first token after {report.first_token_s:.3g} s",
    }
    if report.tokens_per_s is not None:
        pairs["speed"] = (
            f"{report.tokens_per_s:,.1f} tokens/s "
            f"(vector work overlapped {report.tokens_per_s_overlapped:,.1f}, serial {report.tokens_per_s_serial:,.1f})"
        )
        pairs["energy"] = (
            f"{energy(totals['energy_per_token_pj'])} a token with HBM; "
            f"{energy(totals['energy_core_per_token_pj'])} core only, as the paper counts"
        )
    return pairs


def show_functional(run: "FunctionalResult") -> None:
    """Perplexity of a bit-true run and how it agrees with torch."""
    found = run.perplexity
    pairs = {"perplexity": f"{found.value:.4f} on {found.data}, {found.windows} x {found.seqlen} tokens"}
    if run.agreement is not None:
        a = run.agreement
        pairs |= {
            "torch": f"perplexity {a.perplexity:.4f} on the same windows",
            "layers": f"{a.layers} compared on the same input; greatest relative difference {a.layer_error:.1e}",
            "indices": f"{a.index_flips} differ; {a.outlier_flips} outlier marks differ",
            "logits": f"relative difference {a.logits_error:.1e} end to end; KL divergence {a.kl_mean:.1e} nats",
        }
    else:
        pairs["torch"] = "not compared; name the quantized folder with --reference"
    show_pairs(f"Bit-true run of the image ({run.engine})", pairs)


def _shares(amounts: Mapping[str, float]) -> list[list[str]]:
    total = sum(amounts.values()) or 1
    ordered = sorted(amounts.items(), key=lambda item: -item[1])
    return [[name, f"{amount:,.0f}", f"{amount / total:.1%}"] for name, amount in ordered if amount]
