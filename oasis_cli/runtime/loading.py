"""Opening quantized folders to run them, with nothing left to chance."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from oasis_cli.errors import InputError
from oasis_cli.formats.baseline import BASELINE_QUANT_METHOD, BaselineSpec
from oasis_cli.formats.quantized import QuantizationSpec
from oasis_cli.models.checkpoint import Checkpoint, open_checkpoint, refuse_incomplete
from oasis_cli.models.quiet import quiet_transformers
from oasis_cli.runtime import transformers_plugin as transformers_plugin  # enters the method into transformers' table


def open_quantized(folder: str | Path) -> tuple[Checkpoint, QuantizationSpec]:
    """Find a quantized folder and read its specification, without loading it.

    Raises:
        InputError: not there, damaged, not quantized by oasis, or by a newer version of it.
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.quantization is None:
        raise InputError(f"{checkpoint.path}: is not quantized; run oasis quantize on it first")
    spec = QuantizationSpec.from_config(checkpoint.config.quantization_config, str(checkpoint.path / "config.json"))
    return checkpoint, spec


def open_baseline(folder: str | Path) -> tuple[Checkpoint, BaselineSpec]:
    """Find a folder of a method to compare with and read its specification, without loading it.

    Raises:
        InputError: not there, damaged, or of another kind.
    """
    checkpoint = open_checkpoint(folder)
    block = getattr(checkpoint.config, "quantization_config", None) or {}
    return checkpoint, BaselineSpec.from_config(block, str(checkpoint.path / "config.json"))


def load(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load what `oasis quantize` wrote, by any method, for inference.

    Args:
        folder: of any method.
        device: where the model goes.
        dtype: of what is not quantized (embeddings, norms, output head) and of the activations between layers.

    Raises:
        InputError: not there, damaged, quantized by another tool, or any tensor is missing, unexpected or of another
            shape.
    """
    checkpoint = open_checkpoint(folder)
    checkpoint, _ = (open_baseline if checkpoint.quantization == BASELINE_QUANT_METHOD else open_quantized)(folder)
    with quiet_transformers():
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # `refuse_incomplete` names them
            output_loading_info=True,
        )
    refuse_incomplete(checkpoint.path, info)
    loaded: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return loaded
