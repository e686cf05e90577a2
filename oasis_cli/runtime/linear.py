"""The quantized linear layer as a torch module: it holds what the folder stores and computes by `numerics`."""

import weakref
from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from oasis_cli.formats.packing import unpack_indices
from oasis_cli.formats.quantized import QuantizationSpec, declare_layer
from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.gemm import (
    ActivationFormat,
    QuantizedActivations,
    QuantizedWeight,
    apply_weight,
    dequantized,
    quantize_activations,
)


class _LastInput:
    """Keeps a site's quantized input for the next layer that reads the very same tensor.

    One is enough, since the layers of a site run one after the other; it goes when the tensor goes.
    """

    def __init__(self) -> None:
        self._kept: tuple[weakref.ref[Tensor], int, ActivationFormat, QuantizedActivations] | None = None

    def quantize(self, x: Tensor, fmt: ActivationFormat) -> QuantizedActivations:
        if x.is_inference():  # such a tensor does not tell whether it was written to
            return quantize_activations(x.reshape(-1, x.shape[-1]), fmt)
        kept = self._kept  # read once: another thread may replace it
        if kept is not None and kept[0]() is x and kept[1] == x._version and _is_same(kept[2], fmt):
            return kept[3]
        act = quantize_activations(x.reshape(-1, x.shape[-1]), fmt)
        self._kept = weakref.ref(x, self._forget), x._version, fmt, act
        return act

    def _forget(self, _: "weakref.ref[Tensor]") -> None:
        self._kept = None


def _is_same(one: ActivationFormat, other: ActivationFormat) -> bool:
    settings = [(f.codebook.step, f.scale_kind, f.outliers_a_side, f.thresholds is None) for f in (one, other)]
    if settings[0] != settings[1] or not torch.equal(one.codebook.centroids, other.codebook.centroids):
        return False
    return one.thresholds is None or other.thresholds is None or torch.equal(one.thresholds, other.thresholds)


_LAST_INPUT: Final = _LastInput()


class OasisLinear(nn.Module):
    """Non-uniformly quantized weights times non-uniformly quantized activations, plus the outliers' compensation.

    Its buffers are named, shaped and typed as the quantized folder declares them: the folder holds its state dict. All
    but the bias are numbers of the format, and casting the module leaves them as they are.

    Args:
        name: the layer's name in `spec.layers`.
        spec: the folder's specification.
        bias: dtype of the bias, None for a layer without.
        device: where the buffers are made, zeroed.
    """

    weight: Tensor
    weight_codebook: Tensor
    weight_scale: Tensor
    act_codebook: Tensor | None
    act_thresholds: Tensor | None
    cache_codebook: Tensor | None
    codebook_steps: Tensor
    bias: Tensor | None

    def __init__(
        self,
        name: str,
        spec: QuantizationSpec,
        bias: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.in_features = spec.layers[name].in_features
        self.out_features = spec.layers[name].out_features
        self.layer = spec.layers[name]
        for optional in ("act_codebook", "act_thresholds", "cache_codebook"):
            self.register_buffer(optional, None)
        self.register_buffer("bias", None)
        for tensor, (shape, dtype) in declare_layer(name, spec, bias).items():
            self.register_buffer(tensor.rpartition(".")[2], torch.zeros(shape, dtype=dtype, device=device))
        self._operands: tuple[ActivationFormat | None, QuantizedWeight] | None = None

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for activations of any leading shape; no gradient passes.

        Args:
            x: float [..., K]; float16 and bfloat16 are widened exactly.

        Returns:
            [..., N] in the dtype of x.
        """
        fmt, weight = self._unpacked()
        if fmt is None:
            y = nn.functional.linear(x.reshape(-1, self.in_features).float(), weight.dequantize())
            y = y if weight.bias is None else y + weight.bias.float()
        else:
            y = apply_weight(_LAST_INPUT.quantize(x, fmt), fmt.codebook, weight)
        if self.cache_codebook is not None and self.spec.cache is not None:
            heads = y.reshape(-1, self.spec.cache.head_dim)
            y = dequantized(heads, ActivationFormat(Codebook(self.cache_codebook), self.spec.scale_kind))
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def quantize_activations(self, x: Tensor) -> QuantizedActivations:
        """The layer's input, float [..., K], as both branches take it: its rows as M tokens, quantized.

        Raises:
            ValueError: the layer leaves its input as it is.
        """
        fmt = self._unpacked()[0]
        if fmt is None:
            raise ValueError("this layer's activations are not quantized")
        return _LAST_INPUT.quantize(x, fmt)

    def _unpacked(self) -> tuple[ActivationFormat | None, QuantizedWeight]:
        if self._operands is None:
            self._operands = self._unpack()
        return self._operands

    def _unpack(self) -> tuple[ActivationFormat | None, QuantizedWeight]:
        weight_step, act_step = self.codebook_steps.tolist()
        activations = None
        if self.act_codebook is not None:
            activations = ActivationFormat(
                Codebook(self.act_codebook, act_step),
                self.spec.scale_kind,
                self.spec.outliers_a_side(self.in_features),
                self.act_thresholds,
            )
        index = unpack_indices(self.weight, self.in_features)
        return activations, QuantizedWeight(
            index, Codebook(self.weight_codebook, weight_step), self.weight_scale, self.bias
        )

    def dequantize(self) -> Tensor:
        """The weights as ordinary numbers, float32 [N, K]."""
        return self._unpack()[1].dequantize()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # to(), half(), cuda() and their like all come through here. Seen as bytes, the format's numbers follow a move
        # and no cast, which would change what the codebooks and scales say.
        self._operands = None
        for name, buffer in self._buffers.items():
            if buffer is None:
                continue
            if name == "bias":
                self._buffers[name] = fn(buffer)
            else:
                moved = fn(buffer.view(torch.uint8))
                if moved.dtype is not torch.uint8:  # Module.type() casts whole numbers too
                    moved = buffer.view(torch.uint8).to(moved.device)
                self._buffers[name] = moved.view(buffer.dtype)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._operands = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_operands": None}  # copies and pickles unpack for themselves

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        bits = f"W{self.layer.weight_bits}A{self.layer.act_bits}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {bits}"
