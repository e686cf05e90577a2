"""Which layers are quantized, and with how many bits each: what patterns in the settings come to for a model."""

import re
from collections.abc import Mapping

from oasis_cli.errors import InputError
from oasis_cli.formats.calibration import Calibration
from oasis_cli.formats.quantized import AS_IT_IS, LayerSpec
from oasis_cli.models.checkpoint import Checkpoint
from oasis_cli.quantization.settings import QuantizationSettings

HEAD = "lm_head"


def select_layers(
    checkpoint: Checkpoint, calibration: Calibration, options: QuantizationSettings
) -> dict[str, LayerSpec]:
    """The layers to quantize with their sites and bits; output channels are not known yet and are 0.

    Raises:
        InputError: a pattern that is found in no layer's name, nothing left to quantize, or layers that share a site
            with different bits of activations.
    """
    names = [layer for site in calibration.sites.values() for layer in site.layers]
    for pattern in (*options.ignore, *(entry.layers for entry in options.overrides)):
        if not any(re.search(pattern, name) for name in names):
            raise InputError(f"{checkpoint.path}: no layer's name holds {pattern!r}; names are like {names[0]}")
    layers: dict[str, LayerSpec] = {}
    for site_name, site in calibration.sites.items():
        for name in site.layers:
            if not any(re.search(pattern, name) for pattern in options.ignore):
                layers[name] = LayerSpec(site_name, site.K, 0, *_bits(name, options))
    if not layers:
        raise InputError(f"{checkpoint.path}: ignore names every layer, so that none is left; take out a pattern")
    _refuse_split_sites(layers)
    if options.head_bits is not None:
        layers[HEAD] = LayerSpec(HEAD, checkpoint.config.hidden_size, 0, options.head_bits, AS_IT_IS)
    return layers


def _bits(name: str, options: QuantizationSettings) -> tuple[int, int]:
    weight_bits, act_bits = options.weight_bits, options.act_bits
    for entry in options.overrides:
        if re.search(entry.layers, name):
            weight_bits = weight_bits if entry.weight_bits is None else entry.weight_bits
            act_bits = act_bits if entry.act_bits is None else entry.act_bits
    return weight_bits, act_bits


def _refuse_split_sites(layers: Mapping[str, LayerSpec]) -> None:
    first: dict[str, str] = {}
    for name, layer in layers.items():
        other = first.setdefault(layer.site, name)
        if layers[other].act_bits != layer.act_bits:
            raise InputError(
                f"{name} would take activations of {layer.act_bits} bits and {other} of {layers[other].act_bits}, but "
                "both read the same ones; let the pattern of overrides fit both"
            )
