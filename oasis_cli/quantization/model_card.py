"""The model card of a quantized folder: what was done to which model, and how to load it."""

from collections.abc import Mapping
from typing import Any

from oasis_cli.formats.quantized import QuantizationSpec

_OUTLIERS = {
    "dynamic": "the {share:.2%} largest and the {share:.2%} smallest values of each token, kept in full precision",
    "static": "values beyond thresholds learnt in calibration, kept in full precision",
    "none": "none",
}


def model_card(report: Mapping[str, Any], spec: QuantizationSpec) -> str:
    """README.md of the folder, from its report (without figures of accuracy: `oasis eval` measures those)."""
    totals = report["totals"]
    outliers = _OUTLIERS[spec.outlier_mode].format(share=spec.outlier_fraction)
    cache = "as they are" if spec.cache is None else f"{spec.cache.bits} bits, one scale a token and head"
    shrunk = f"{totals['bytes_before'] / 1e6:.1f} MB at 16 bits -> {totals['bytes_after'] / 1e6:.1f} MB"
    return f"""---
library_name: transformers
tags: [oasis, quantized, {spec.shown_bits.lower().replace(" ", ", ")}]
---
# {report["model"]}, quantized by oasis

| | |
| --- | --- |
| method | `{spec.method}` |
| weights | {_bits(spec, "weight_bits")}, one codebook a matrix, one scale an output channel |
| activations | {_bits(spec, "act_bits")}, one codebook a site, one scale a token (`{spec.scale_kind}`) |
| keys and values in the cache | {cache} |
| outliers | {outliers} |
| codebook grid | `{spec.codebook_grid}` |
| quantized layers | {len(report["layers"])}: {shrunk} |
| left unquantized | embeddings, norms, biases, output head: {totals["bytes_other"] / 1e6:.1f} MB |
| squared error of the weights | {totals["relative_error"]:.3%} of their squares |
| original | `{report["created_from"]["model"]}` |
| calibration | `{report["created_from"]["calibration"]}` |

```python
import oasis_cli  # registers the format with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this folder")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```

`oasis verify` checks every file of this folder, `oasis eval` measures its perplexity.
"""


def _bits(spec: QuantizationSpec, side: str) -> str:
    """Such as `4 bits`, or `3 and 4 bits` where layers differ."""
    found = sorted({getattr(layer, side) for layer in spec.layers.values()})
    return " and ".join(str(bits) for bits in found) + " bits"
