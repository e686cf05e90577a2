"""The `oasis` quantization method of transformers: importing this module enters it into transformers' table.

It is imported while transformers itself is half-way through importing, so it may take nothing from there but the base
classes of its own kind.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from oasis_cli.errors import InputError
from oasis_cli.formats.quantized import QUANT_METHOD, QuantizationSpec
from oasis_cli.runtime import baseline as baseline  # enters its own method
from oasis_cli.runtime.declared import compare_layers, compare_shapes
from oasis_cli.runtime.linear import OasisLinear


class OasisConfig(QuantizationConfigMixin):
    """The `quantization_config` block of config.json.

    Raises:
        InputError: a damaged block, or one of a newer version.
    """

    def __init__(self, **block: Any) -> None:
        self.quant_method = QUANT_METHOD
        self.spec = QuantizationSpec.from_config({"quant_method": QUANT_METHOD} | block, "config.json")

    def to_dict(self) -> dict[str, Any]:
        """The block as it stands in config.json."""
        return self.spec.to_config()


class OasisHfQuantizer(HfQuantizer):
    """Puts `OasisLinear` where the specification names a layer; transformers' loader then fills the buffers."""

    requires_calibration = True

    def __init__(self, quantization_config: OasisConfig, **kwargs: Any) -> None:
        if not kwargs.get("pre_quantized", True):
            raise InputError("model: is not quantized yet, and loading does not quantize it; run oasis quantize first")
        super().__init__(quantization_config, **kwargs)

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> nn.Module:
        spec = self.quantization_config.spec
        biases = {name: _replace_linear(model, name, spec) for name in spec.layers}
        if checkpoint_files is None:  # the caller brings a state dict of his own
            return model
        files = [Path(file) for file in checkpoint_files]
        shapes = {tensor: value.shape for tensor, value in model.state_dict().items()}
        if problems := compare_layers(files, spec, biases) + compare_shapes(files, shapes):
            raise InputError(problems[0])
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        # A class of transformers itself would not write the file that auto_map names when the model is saved again.
        if type(model).__module__.startswith("transformers.") and hasattr(model.config, "auto_map"):
            del model.config.auto_map
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """`save_pretrained` writes the buffers as they were loaded."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Indices have no gradient."""
        return False


def _replace_linear(model: nn.Module, name: str, spec: QuantizationSpec) -> bool:
    """Swap one layer for its quantized kind; whether it has a bias."""
    layer = spec.layers[name]
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        linear = None
    if not isinstance(linear, nn.Linear):
        raise InputError(
            f"config.json: quantization_config names {name}, which the model lacks; run oasis quantize again"
        )
    if (linear.in_features, linear.out_features) != (layer.in_features, layer.out_features):
        raise InputError(
            f"config.json: {name} is {layer.in_features} to {layer.out_features} channels in quantization_config and "
            f"{linear.in_features} to {linear.out_features} in the model; run oasis quantize again"
        )
    bias = None if linear.bias is None else linear.bias.dtype
    model.set_submodule(name, OasisLinear(name, spec, bias, device=linear.weight.device))
    return bias is not None


if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config(QUANT_METHOD)(OasisConfig)
    register_quantizer(QUANT_METHOD)(OasisHfQuantizer)
