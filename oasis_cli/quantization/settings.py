"""How to quantize: the stage's settings."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, Literal, get_args

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as settings

from oasis_cli.config import STRICT
from oasis_cli.formats.baseline import BASELINES, BaselineMethod
from oasis_cli.formats.quantized import AS_IT_IS, BITS, OutlierMode
from oasis_cli.numerics.codebook import CodebookGrid
from oasis_cli.numerics.scale import ScaleKind

OwnMethod = Literal["oasis-plus", "oasis", "oasis-s"]
Method = Literal[OwnMethod, BaselineMethod]
METHODS: Final[tuple[str, ...]] = (*get_args(OwnMethod), *BASELINES)
_OWN: Final = frozenset(get_args(OwnMethod))
_PLUS: Final = frozenset({"oasis-plus"})
_BY_FEEDBACK: Final = frozenset({"oasis-plus", "quarot", "atom"})
_METHODS_OF: Final[Mapping[str, frozenset[str]]] = (
    dict.fromkeys(("codebook_grid", "overrides", "kv_bits", "head_bits"), _OWN)
    | dict.fromkeys(("scale_kind", "refit_samples", "damping"), _PLUS)
    | dict.fromkeys(("tune_epochs", "tune_seqlen", "tune_batch", "tune_rate"), _PLUS)
    | {
        "feedback_samples": _BY_FEEDBACK,
        "smooth_alpha": frozenset({"smoothquant"}),
        "wide_channels": frozenset({"atom"}),
    }
)
"""Settings that not every method has."""
PRESETS: Final[Mapping[str, Mapping[str, float]]] = {
    "fast": {"refit_samples": 1, "feedback_samples": 4, "tune_epochs": 0.0},
    "default": {},
    "best": {"refit_samples": 4, "feedback_samples": 16},
}
"""Settings of oasis-plus by how long one is ready to wait: calibration sequences passed, and whether it tunes."""
_BASELINE_BITS: Final[tuple[int, ...]] = (2, 3, 4, 5, 6, 7, 8, AS_IT_IS)
_BLOCK_FLOAT_BITS: Final[tuple[int, ...]] = (4, AS_IT_IS)


@settings(frozen=True, config=STRICT)
class LayerBits:
    r"""Other bits for some layers.

    Attributes:
        layers: regular expression, found anywhere in a layer's name, such as `down_proj$` or `layers\.[0-3]\.`.
        weight_bits: n_W; None keeps what holds without this entry.
        act_bits: n_A, of the whole site; None keeps what holds without this entry.
    """

    layers: str
    weight_bits: int | None = None
    act_bits: int | None = None

    @model_validator(mode="after")
    def _check(self) -> "LayerBits":
        _compile(self.layers)
        _refuse_other("weight_bits", self.weight_bits, (None, *BITS), "oasis")
        _refuse_other("act_bits", self.act_bits, (None, *BITS, AS_IT_IS), "oasis")
        return self


@settings(frozen=True, config=STRICT)
class QuantizationSettings:
    """How to quantize.

    Attributes:
        method: `oasis-plus` (numbers of the paper's format, chosen for what the model gives out), the paper's own
            `oasis` (dynamic outliers) and `oasis-s` (static thresholds), or one to compare with: `rtn`, `smoothquant`,
            `quarot`, `atom`, `mxfp4`, `nvfp4`.
        weight_bits: bits of a weight index, n_W: 1 to 4. Methods to compare with take 2 to 8, and 16 for none.
        act_bits: bits of an activation index, n_A: 1 to 4, or 16 to leave activations as they are. Methods to compare
            with take 2 to 8, and 16.
        outlier_fraction: outliers a side; None takes the calibration's, and no other than that is possible.
        codebook_grid: `int8` makes LUT entries and their sums exact integers; `fp16` rounds centroids and LUT entries
            to float16.
        seed: of K-Means over the weights, of the order of tuning, and of the signs of quarot's rotation.
        ignore: regular expressions; layers in whose names one is found stay as they are.
        overrides: other bits for some layers, such as `{layers: 'down_proj$', weight_bits: 3, act_bits: 4}`, either
            side of which may be left out; of several entries that fit, the last one counts.
        kv_bits: bits of an index of a cached key or value, which share a codebook a layer and have one scale a token
            and head; None leaves the cache as it is. Keys are quantized before their rotation.
        head_bits: n_W of the output head, whose activations stay as they are; None leaves it as it is.
        scale_kind: the token scale, of oasis-plus. `inlier_absmax` is a little more accurate, but puts the outlier
            search on the accelerator's critical path.
        refit_samples: calibration sequences from which oasis-plus finds each site's codebook again, on inputs that the
            blocks before it give once quantized; 0 keeps the calibration's codebooks and its scale kind.
        feedback_samples: calibration sequences whose second moments guide the weights. In oasis-plus they are an
            importance in K-Means, guide the fit of scales, and the passing on of errors from channel to channel; 0
            leaves K-Means of each matrix alone. quarot and atom take them for GPTQ; 0 rounds to nearest.
        damping: of oasis-plus, added to the diagonal of the second moments, as a share of its mean.
        tune_epochs: how often oasis-plus passes the calibration tokens to tune scales, codebooks and norms of the whole
            model by gradient; 0 leaves them.
        tune_seqlen: tokens of the sequences that they are cut into for it.
        tune_batch: sequences a step.
        tune_rate: step of scales, relative to their size; codebooks and norms take half of it.
        smooth_alpha: of smoothquant, how much of the difficulty moves from activations into weights.
        wide_channels: of atom, input channels that stay at 8 bits; None takes as large a share as 128 of 4096.
    """

    method: Method = "oasis-plus"
    weight_bits: int = 4
    act_bits: int = 4
    outlier_fraction: float | None = Field(default=None, ge=0, le=0.5)
    codebook_grid: CodebookGrid = "int8"
    seed: int = Field(default=0, ge=0)
    ignore: tuple[str, ...] = ()
    overrides: tuple[LayerBits, ...] = ()
    kv_bits: int | None = Field(default=None, ge=1, le=4)
    head_bits: int | None = Field(default=None, ge=1, le=4)
    scale_kind: ScaleKind = "mean_abs"
    refit_samples: int = Field(default=2, ge=0)
    feedback_samples: int = Field(default=8, ge=0)
    damping: float = Field(default=0.01, gt=0, le=1)
    tune_epochs: float = Field(default=1, ge=0)
    tune_seqlen: int = Field(default=512, ge=2)
    tune_batch: int = Field(default=4, ge=1)
    tune_rate: float = Field(default=0.002, gt=0, le=1)
    smooth_alpha: float = Field(default=0.5, ge=0, le=1)
    wide_channels: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> "QuantizationSettings":
        changed = [field.name for field in fields(self) if getattr(self, field.name) != _default(field)]
        refuse_foreign(self.method, changed)
        weights, activations = _bits_of(self.method)
        _refuse_other("weight_bits", self.weight_bits, weights, self.method)
        _refuse_other("act_bits", self.act_bits, activations, self.method)
        for pattern in self.ignore:
            _compile(pattern)
        return self

    @property
    def is_baseline(self) -> bool:
        """Whether the method is one to compare with."""
        return self.method not in _OWN

    @property
    def foreign_to_accelerator(self) -> str | None:
        """The setting, if any, for which the accelerator cannot run the result."""
        whole = AS_IT_IS in (self.act_bits, *(entry.act_bits for entry in self.overrides))
        found = {"method": self.is_baseline, "act_bits": whole, "kv_bits": self.kv_bits, "head_bits": self.head_bits}
        return next((f"{name} {getattr(self, name)}" for name, foreign in found.items() if foreign), None)

    @property
    def refines(self) -> bool:
        """Whether the calibration's tokens are passed again."""
        return self.method == "oasis-plus"

    @property
    def outlier_mode(self) -> OutlierMode:
        """How outliers are found when the model runs (§V-A)."""
        return "static" if self.method == "oasis-s" else "dynamic"

    @property
    def feeds_back(self) -> bool:
        """Whether second moments guide the weights."""
        return self.refines and self.feedback_samples > 0

    @property
    def refits(self) -> bool:
        """Whether the sites' codebooks are found again."""
        return self.refines and self.refit_samples > 0

    @property
    def tunes(self) -> bool:
        """Whether scales, codebooks and norms are tuned by gradient."""
        return self.refines and self.tune_epochs > 0


def refuse_foreign(method: str, names: Iterable[str]) -> None:
    """Refuse settings that a method does not have.

    Args:
        method: its name.
        names: the settings that somebody gave.

    Raises:
        ValueError: naming the first.
    """
    for name in names:
        allowed = _METHODS_OF.get(name)
        if allowed is not None and method not in allowed:
            owners = ", ".join(known for known in METHODS if known in allowed)
            raise ValueError(f"{name}: a setting of {owners}, not of {method}")


def _bits_of(method: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bits that a method's weights and activations may have."""
    if method in _OWN:
        return BITS, (*BITS, AS_IT_IS)
    sides = _BLOCK_FLOAT_BITS if method in ("mxfp4", "nvfp4") else _BASELINE_BITS
    return sides, sides


def _default(field: Any) -> Any:
    """A field's default; pydantic leaves a plain one as it is and wraps one with limits."""
    return getattr(field.default, "default", field.default)


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error})") from None


def _refuse_other(name: str, value: object, allowed: tuple[Any, ...], method: str) -> None:
    if value not in allowed:
        numbers = [str(each) for each in allowed if each is not None]
        raise ValueError(f"{name}: must be one of {', '.join(numbers)} for {method}, got {value}")
