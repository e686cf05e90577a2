"""Settings of the later stages, and how the command line lays its options over settings; needs no tensor library."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Final, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass as settings

from oasis_cli.config import STRICT, from_mapping

T = TypeVar("T")

_DECODE: Final = 2048
"""Tokens that the paper generates (§V-A)."""


@settings(frozen=True, config=STRICT)
class CompileSettings:
    """How to compile.

    Attributes:
        target: a shipped accelerator or a YAML file.
    """

    target: str = "oasis-28nm"


@settings(frozen=True, config=STRICT)
class SimulationSettings:
    """What to simulate.

    Attributes:
        batch: sequences at a time.
        prefill: tokens of the prompt.
        decode: tokens to generate; None takes 2048, or what the prompt leaves of the model's positions if that is less.
    """

    batch: int = Field(default=1, ge=1)
    prefill: int = Field(default=0, ge=0)
    decode: int | None = Field(default=None, ge=0)

    def decode_within(self, positions: int) -> int:
        """Tokens to generate with a model of so many positions; what was asked for stays as it is."""
        return max(0, min(_DECODE, positions - self.prefill)) if self.decode is None else self.decode


@settings(frozen=True, config=STRICT)
class EvaluationSettings:
    """What to measure perplexity on.

    Attributes:
        ppl: names or paths of texts; empty takes the evaluation part of the text that comes with Python.
        seqlen: tokens in a window.
        limit: windows of each text; None takes all.
    """

    ppl: tuple[str, ...] = ()
    seqlen: int = Field(default=2048, ge=2)
    limit: int | None = Field(default=None, ge=1)


def override(options: T, given: Mapping[str, Any]) -> T:
    """Settings with the options that the command line gave; None means that an option was not given.

    Raises:
        InputError: a value is impossible.
    """
    if not is_dataclass(options) or isinstance(options, type):
        raise ValueError("override takes an instance of a settings class")
    known = {f.name for f in fields(options)}
    changed = {name: value for name, value in given.items() if name in known and value is not None}
    return from_mapping(asdict(options) | changed, type(options), "command line")
