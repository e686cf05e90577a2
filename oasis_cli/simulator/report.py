"""What a simulation says, as dataclasses and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from oasis_cli.simulator.area import ChipArea
from oasis_cli.simulator.energy import HBM


@dataclass(frozen=True)
class LayerReport:
    """One linear layer of a kind of decoder block, in one phase.

    Attributes:
        name: its module, the block's number replaced by "*".
        phase: "prefill" or "decode".
        M: tokens of one execution.
        K: input channels.
        N: output channels.
        repeat: how many blocks have it, so how often one pass through the model runs it.
        passes: passes through the model in this phase.
        cycles: one execution: `main_cycles` and the stalls.
        main_cycles: counting and reducing alone, without filling the pipeline.
        outlier_cycles: search and compensation, beside the main branch.
        merge_cycles: adding the branches, mostly beside them.
        hbm_cycles: moving its bytes at the memory's stream rate, beside them.
        quantize_cycles: scales and clustering of its site; 0 for a layer that takes over another's indices.
        stalls: cycles of one execution by cause.
        bytes: bytes of one execution, read from each buffer and moved by the HBM; with the site's clustering where
            `quantize_cycles` has it.
        energy_pj: energy of one execution by unit; with the site's clustering likewise.
    """

    name: str
    phase: str
    M: int
    K: int
    N: int
    repeat: int
    passes: int
    cycles: int
    main_cycles: int
    outlier_cycles: int
    merge_cycles: int
    hbm_cycles: int
    quantize_cycles: int
    stalls: Mapping[str, int]
    bytes: Mapping[str, int]
    energy_pj: Mapping[str, float]


@dataclass(frozen=True)
class KindReport:
    """All operations of one opcode in one phase; `cycles` counts matrix and vector work one after the other."""

    phase: str
    opcode: str
    executions: int
    cycles: int
    bytes: Mapping[str, int]
    energy_pj: Mapping[str, float]


@dataclass(frozen=True)
class PhaseReport:
    """One phase: the prompt, or the decode.

    Attributes:
        name: "prefill" or "decode".
        steps: passes through the model.
        tokens: tokens fed, all sequences together.
        cycles: its time under the target's schedule: all of `work` and `stalls`.
        cycles_overlapped: its time with vector work behind the matrix work before it.
        cycles_serial: its time with nothing overlapped but the two branches and the weight stream.
        first_step_cycles: its first pass alone.
        seconds: `cycles` on the target's clock.
        tokens_per_s: tokens fed a second.
        work: productive cycles: "main_branch", "dense".
        stalls: the other cycles by cause: "hbm", "fill", "outlier_branch", "vector" (vector work that nothing hides).
        bytes: bytes read from each buffer and moved by the HBM.
        hbm_bytes: the HBM's share by content.
        utilisation: share of the cycles in which each unit works; a buffer that serves two units at once may pass 1.
        energy_pj: energy by unit.
    """

    name: str
    steps: int
    tokens: int
    cycles: int
    cycles_overlapped: int
    cycles_serial: int
    first_step_cycles: int
    seconds: float
    tokens_per_s: float
    work: Mapping[str, int]
    stalls: Mapping[str, int]
    bytes: Mapping[str, int]
    hbm_bytes: Mapping[str, int]
    utilisation: Mapping[str, float]
    energy_pj: Mapping[str, float]


@dataclass(frozen=True)
class SimulationReport:
    """A program on a target.

    Attributes:
        target: its name.
        model: the shape's name.
        clock_mhz: the target's clock.
        batch: sequences.
        prefill: tokens of each prompt.
        decode: passes after it, one token of each sequence each.
        operations: the linear layers, the decode's first.
        kinds: all operations by opcode.
        phases: the prompt (if any) and the decode (if any).
        chip: area and power.
    """

    target: str
    model: str
    clock_mhz: float
    batch: int
    prefill: int
    decode: int
    operations: tuple[LayerReport, ...]
    kinds: tuple[KindReport, ...]
    phases: tuple[PhaseReport, ...]
    chip: ChipArea

    @property
    def cycles(self) -> int:
        """All phases together."""
        return sum(phase.cycles for phase in self.phases)

    @property
    def seconds(self) -> float:
        """All phases together."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def first_token_s(self) -> float:
        """Until the first token: the prompt's pass, or the decode's first where there is no prompt."""
        return self.phases[0].first_step_cycles / (self.clock_mhz * 1e6)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens generated a second of the decode, all sequences together; None without a decode."""
        decode = self._phase("decode")
        return decode.tokens_per_s if decode else None

    @property
    def tokens_per_s_overlapped(self) -> float | None:
        """`tokens_per_s` with vector work overlapped, whatever the target's schedule says."""
        return self._speed("cycles_overlapped")

    @property
    def tokens_per_s_serial(self) -> float | None:
        """`tokens_per_s` with vector work serial, whatever the target's schedule says."""
        return self._speed("cycles_serial")

    @property
    def energy_pj(self) -> dict[str, float]:
        """Energy by unit, all phases together."""
        return _sum([phase.energy_pj for phase in self.phases])

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; energies in pJ, sizes in bytes."""
        decode = self._phase("decode")
        energy = self.energy_pj
        totals = {
            "cycles": self.cycles,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_overlapped": self.tokens_per_s_overlapped,
            "tokens_per_s_serial": self.tokens_per_s_serial,
            "first_token_s": self.first_token_s,
            "energy_pj": energy,
            "energy_total_pj": sum(energy.values()),
            "energy_core_pj": _core(energy),
            "energy_per_token_pj": sum(decode.energy_pj.values()) / decode.tokens if decode else None,
            "energy_core_per_token_pj": _core(decode.energy_pj) / decode.tokens if decode else None,
            "work": _sum([phase.work for phase in self.phases]),
            "stalls": _sum([phase.stalls for phase in self.phases]),
            "bytes": _sum([phase.bytes for phase in self.phases]),
            "hbm_bytes": _sum([phase.hbm_bytes for phase in self.phases]),
        }
        return {
            "target": self.target,
            "model": self.model,
            "clock_mhz": self.clock_mhz,
            "batch": self.batch,
            "prefill": self.prefill,
            "decode": self.decode,
            "operations": [asdict(layer) for layer in self.operations],
            "kinds": [asdict(kind) for kind in self.kinds],
            "phases": [asdict(phase) for phase in self.phases],
            "totals": totals,
            "chip": asdict(self.chip),
        }

    def _phase(self, name: str) -> PhaseReport | None:
        return next((phase for phase in self.phases if phase.name == name), None)

    def _speed(self, cycles: str) -> float | None:
        decode = self._phase("decode")
        return decode.tokens * self.clock_mhz * 1e6 / getattr(decode, cycles) if decode else None


def _core(energy: Mapping[str, float]) -> float:
    """The chip without its memory, as the paper counts."""
    return sum(value for unit, value in energy.items() if unit != HBM)


def _sum(tables: list[Mapping[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            total[key] = total.get(key, 0) + value
    return total
