"""One quantized layer as the accelerator holds it: checked codebooks, the LUT, and the streamed weight indices."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasis_cli.compiler.source import CURE, QuantizedFolder
from oasis_cli.errors import InputError
from oasis_cli.formats.quantized import declare_layer
from oasis_cli.formats.weight_order import stream_order
from oasis_cli.numerics.codebook import Codebook, boundaries
from oasis_cli.numerics.lut import Lut, build_lut


@dataclass(frozen=True)
class SiteTables:
    """What a site's QUANTIZE needs.

    Attributes:
        codebook: float16 [2**n_A].
        boundaries: float32 [2**n_A - 1].
        thresholds: lower and upper, float32 [2], for static outliers only.
    """

    codebook: Tensor
    boundaries: Tensor
    thresholds: Tensor | None


@dataclass(frozen=True)
class LayerTables:
    """The small tensors of a layer.

    Attributes:
        codebook: float16 [2**n_W].
        lut: products of all centroids.
        site: what its site needs, as this layer has it.
    """

    codebook: Tensor
    lut: Lut
    site: SiteTables


def read_tables(source: QuantizedFolder, name: str, bias: bool) -> LayerTables:
    """Check a layer's declared tensors and read the small ones.

    Args:
        source: the quantized folder.
        name: the layer.
        bias: whether the model has a bias there.

    Raises:
        InputError: a tensor is absent, has another shape or type, or its numbers cannot be.
    """
    spec = source.spec
    expected = declare_layer(name, spec)
    for tensor, (shape, dtype) in expected.items():
        source.declare(tensor, shape, dtype)
    if bias:
        source.declare(f"{name}.bias", (spec.layers[name].out_features,))
    steps = source.load(f"{name}.codebook_steps")
    on_grid = spec.codebook_grid == "int8"
    weight = _codebook(source, f"{name}.weight_codebook", float(steps[0]) if on_grid else 0.0)
    act = _codebook(source, f"{name}.act_codebook", float(steps[1]) if on_grid else 0.0)
    try:
        lut = build_lut(act, weight)
    except ValueError as error:
        raise InputError(f"{source.where(f'{name}.codebook_steps')} does not fit the codebooks; {CURE}") from error
    if not lut.entries.isfinite().all():
        where = source.where(f"{name}.weight_codebook")
        raise InputError(f"{where}: products beyond float16; {CURE} with --codebook-grid int8")
    site = SiteTables(act.centroids, boundaries(act.centroids), _thresholds(source, name))
    return LayerTables(weight.centroids, lut, site)


def _codebook(source: QuantizedFolder, tensor: str, step: float) -> Codebook:
    centroids = source.load(tensor)
    if bool((centroids.diff() < 0).any()):
        raise InputError(f"{source.where(tensor)} descends somewhere; {CURE}")
    if source.spec.codebook_grid == "int8" and not step > 0:
        raise InputError(f"{source.where(tensor)}: its step must be positive, got {step}; {CURE}")
    return Codebook(centroids, step)


def _thresholds(source: QuantizedFolder, name: str) -> Tensor | None:
    if source.spec.outlier_mode != "static":
        return None
    thresholds = source.load(f"{name}.act_thresholds")
    if not thresholds[0] <= thresholds[1]:
        raise InputError(f"{source.where(f'{name}.act_thresholds')}: lower above upper; {CURE}")
    return thresholds


def streamed_indices(source: QuantizedFolder, name: str, lines: int) -> Iterator[bytes]:
    """A layer's packed weight indices in the order in which the PE lines stream them.

    Raises:
        InputError: an index beyond the codebook, or a tail nibble that is not zero.
    """
    rows = packed_rows(source, name)
    order = stream_order(len(rows), lines)
    for part in np.array_split(order, max(1, rows.nbytes >> 24)):
        yield rows[part].tobytes()


def packed_rows(source: QuantizedFolder, name: str) -> npt.NDArray[np.uint8]:
    """A layer's packed indices, uint8 [N, ceil(K/2)], every nibble checked.

    Raises:
        InputError: as `streamed_indices`.
    """
    tensor, spec = f"{name}.weight", source.spec
    layer = spec.layers[name]
    levels = 1 << layer.weight_bits
    rows = source.load(tensor)
    low, high = torch.bitwise_and(rows, 0xF), rows >> 4
    if layer.in_features % 2 and bool(high[:, -1].any()):
        raise InputError(f"{source.where(tensor)}: the last half byte of a channel is not zero; {CURE}")
    if int(torch.maximum(low, high).max()) >= levels:
        raise InputError(f"{source.where(tensor)}: an index beyond the {levels} centroids; {CURE}")
    packed: npt.NDArray[np.uint8] = rows.numpy()
    return packed
