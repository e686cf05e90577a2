"""Our quantization methods for transformers: importing this module enters them into transformers' table.

It is imported while transformers itself is half-way through importing, so it may take nothing from there but the base
classes of its own kind.
"""

from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from oasis_cli.errors import InputError
from oasis_cli.formats.baseline import BASELINE_QUANT_METHOD, BaselineSpec
from oasis_cli.formats.quantized import QUANT_METHOD, QuantizationSpec
from oasis_cli.runtime.baseline import replace_linear
from oasis_cli.runtime.declared import compare_layers, compare_shapes
from oasis_cli.runtime.linear import OasisLinear


class _Config(QuantizationConfigMixin):
    """The `quantization_config` block of config.json.

    Raises:
        InputError: a damaged block, or one of a newer version.
    """

    _method: ClassVar[str]
    _reader: ClassVar[type[QuantizationSpec] | type[BaselineSpec]]

    def __init__(self, **block: Any) -> None:
        self.quant_method = self._method
        self.spec = self._reader.from_config({"quant_method": self._method} | block, "config.json")

    def to_dict(self) -> dict[str, Any]:
        """The block as it stands in config.json."""
        return self.spec.to_config()


class OasisConfig(_Config):
    """Of the paper's format."""

    _method, _reader = QUANT_METHOD, QuantizationSpec


class BaselineConfig(_Config):
    """Of a method to compare with."""

    _method, _reader = BASELINE_QUANT_METHOD, BaselineSpec


class _Quantizer(HfQuantizer):
    """What both kinds of folder have in common: they were quantized before, and are written as they were loaded."""

    requires_calibration = True

    def __init__(self, quantization_config: _Config, **kwargs: Any) -> None:
        if not kwargs.get("pre_quantized", True):
            raise InputError("model: is not quantized yet, and loading does not quantize it; run oasis quantize first")
        super().__init__(quantization_config, **kwargs)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """`save_pretrained` writes the buffers as they were loaded."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Indices and rounding have no gradient."""
        return False


class BaselineHfQuantizer(_Quantizer):
    """Puts `BaselineLinear` where the specification names a layer; transformers' loader then fills it."""

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for name, layer in self.quantization_config.spec.layers.items():
            replace_linear(model, name, layer)
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return model


class OasisHfQuantizer(_Quantizer):
    """Puts `OasisLinear` where the specification names a layer; transformers' loader then fills the buffers."""

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


for _config, _quantizer in ((OasisConfig, OasisHfQuantizer), (BaselineConfig, BaselineHfQuantizer)):
    if _config._method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(_config._method)(_config)
        register_quantizer(_config._method)(_quantizer)
