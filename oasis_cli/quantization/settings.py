"""How to quantize: the stage's settings."""

from dataclasses import fields
from typing import Final, Literal, get_args

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as settings

from oasis_cli.config import STRICT
from oasis_cli.formats.quantized import OutlierMode
from oasis_cli.numerics.codebook import CodebookGrid
from oasis_cli.numerics.scale import ScaleKind

Method = Literal["oasis-plus", "oasis", "oasis-s"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)
_REFINEMENTS: Final = (
    "scale_kind",
    "refit_samples",
    "feedback_samples",
    "damping",
    "tune_epochs",
    "tune_seqlen",
    "tune_batch",
    "tune_rate",
)


@settings(frozen=True, config=STRICT)
class QuantizationSettings:
    """How to quantize.

    Attributes:
        method: `oasis-plus` (numbers of the paper's format, chosen for what the model gives out), or the paper's own:
            `oasis` (dynamic outliers) and `oasis-s` (static thresholds). What follows `seed` is of `oasis-plus` alone.
        weight_bits: bits of a weight index, n_W.
        act_bits: bits of an activation index, n_A.
        outlier_fraction: outliers a side; None takes the calibration's, and no other than that is possible.
        codebook_grid: `int8` makes LUT entries and their sums exact integers; `fp16` rounds centroids and LUT entries
            to float16.
        seed: of K-Means over the weights, and of the order of tuning.
        scale_kind: the token scale. `inlier_absmax` is a little more accurate, but puts the outlier search on the
            accelerator's critical path.
        refit_samples: calibration sequences from which each site's codebook is found again, on inputs that the blocks
            before it give once quantized; 0 keeps the calibration's codebooks and its scale kind.
        feedback_samples: calibration sequences whose second moments guide the weights: as importance in K-Means, in
            the fit of scales, and in passing errors on from channel to channel; 0 leaves K-Means of each matrix alone.
        damping: added to the diagonal of the second moments, as a share of its mean.
        tune_epochs: how often the calibration tokens are passed to tune scales, codebooks and norms of the whole model
            by gradient; 0 leaves them.
        tune_seqlen: tokens of the sequences that they are cut into for it.
        tune_batch: sequences a step.
        tune_rate: step of scales, relative to their size; codebooks and norms take half of it.
    """

    method: Method = "oasis-plus"
    weight_bits: int = Field(default=4, ge=1, le=4)
    act_bits: int = Field(default=4, ge=1, le=4)
    outlier_fraction: float | None = Field(default=None, ge=0, le=0.5)
    codebook_grid: CodebookGrid = "int8"
    seed: int = Field(default=0, ge=0)
    scale_kind: ScaleKind = "mean_abs"
    refit_samples: int = Field(default=2, ge=0)
    feedback_samples: int = Field(default=8, ge=0)
    damping: float = Field(default=0.01, gt=0, le=1)
    tune_epochs: float = Field(default=1, ge=0)
    tune_seqlen: int = Field(default=512, ge=2)
    tune_batch: int = Field(default=4, ge=1)
    tune_rate: float = Field(default=0.002, gt=0, le=1)

    @model_validator(mode="after")
    def _only_where_they_count(self) -> "QuantizationSettings":
        if not self.refines:
            for field in fields(self):
                # pydantic leaves a plain default as it is and wraps one with limits
                default = getattr(field.default, "default", field.default)
                if field.name in _REFINEMENTS and getattr(self, field.name) != default:
                    raise ValueError(f"{field.name} is of method oasis-plus alone, not of {self.method}")
        return self

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
