"""The layer of models of the methods that oasis is compared with: dense weights, input rounded on the way in."""

from typing import Final

import torch
from torch import Tensor, nn

from oasis_cli.errors import InputError
from oasis_cli.formats.baseline import BaselineLayer, Rounding
from oasis_cli.numerics.hadamard import rotate
from oasis_cli.numerics.uniform import round_to_integers, round_to_mxfp4, round_to_nvfp4

WIDE_BITS: Final = 8


def round_channels(x: Tensor, rounding: Rounding, order: Tensor | None = None) -> Tensor:
    """Activations as the method's number format holds it.

    Args:
        x: float [..., K].
        rounding: how.
        order: int [K], which channel stands where while groups are formed; None leaves them in their order.

    Returns:
        [..., K] in the dtype of x, channels where they were.
    """
    if rounding.numbers == "none":
        return x
    if rounding.numbers == "mxfp4":
        return round_to_mxfp4(x)
    if rounding.numbers == "nvfp4":
        return round_to_nvfp4(x)
    if order is None:
        return round_to_integers(x, rounding.bits, rounding.group, rounding.clip)
    narrow = x.shape[-1] - rounding.wide_channels
    found = torch.empty_like(x)
    found[..., order[:narrow]] = round_to_integers(x[..., order[:narrow]], rounding.bits, rounding.group, rounding.clip)
    found[..., order[narrow:]] = round_to_integers(x[..., order[narrow:]], WIDE_BITS)
    return found


class BaselineLinear(nn.Linear):
    """A dense layer whose input is rotated and rounded first.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        layer: what is done to the input.
        dtype: of weights and bias.
        device: where they are made.
    """

    act_order: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        layer: BaselineLayer,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.layer = layer
        reordered = layer.activations.wide_channels > 0
        self.register_buffer(
            "act_order", torch.arange(in_features, dtype=torch.int32, device=device) if reordered else None
        )

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output.

        Args:
            input: float [..., K].

        Returns:
            [..., N].
        """
        x = rotate(input) if self.layer.rotated else input
        return super().forward(round_channels(x, self.layer.activations, self.act_order))


def replace_linear(model: nn.Module, name: str, layer: BaselineLayer) -> BaselineLinear:
    """Put a `BaselineLinear` of the same sizes where a linear layer stands; its weights are whatever memory holds.

    Raises:
        InputError: the model has no such layer.
    """
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        linear = None
    if not isinstance(linear, nn.Linear):
        raise InputError(f"config.json: quantization_config names {name}, which the model lacks; quantize it again")
    weight = linear.weight
    new = BaselineLinear(
        linear.in_features, linear.out_features, linear.bias is not None, layer, weight.dtype, weight.device
    )
    model.set_submodule(name, new)
    return new
