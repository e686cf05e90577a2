"""Fitting the program of a shape to what a quantized folder really holds."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from oasis_cli.errors import InputError
from oasis_cli.formats.program import Opcode, Operation
from oasis_cli.formats.quantized import QuantizationSpec

_CURE = "run oasis quantize again"


def fit_program(program: Sequence[Operation], spec: QuantizationSpec, where: str) -> tuple[Operation, ...]:
    """Name the sites as the folder does, and turn layers that it left alone into dense GEMMs.

    Args:
        program: of `build_program`, every linear layer a LUT_GEMM after its site's QUANTIZE.
        spec: which layers are quantized, and at which site.
        where: the folder, for messages.

    Raises:
        InputError: a quantized layer is unknown to the program or has other sizes, or layers that share their input
            disagree about their site.
    """
    _check_layers({op.name: op for op in program if op.opcode is Opcode.LUT_GEMM}, spec, where)
    fitted: list[Operation] = []
    quantize = program[0]
    for number, op in enumerate(program):
        if op.opcode is Opcode.QUANTIZE:
            quantize = op
            fed = takewhile(lambda after: after.opcode is Opcode.LUT_GEMM, program[number + 1 :])
            sites = {spec.layers[gemm.name].site for gemm in fed if gemm.name in spec.layers}
            if len(sites) > 1:
                raise InputError(f"{where}: {op.name} is split into the sites {', '.join(sorted(sites))}; {_CURE}")
            fitted += [replace(op, name=site, act_bits=_act_bits(spec, site)) for site in sites]
        elif op.opcode is Opcode.LUT_GEMM and op.name not in spec.layers:
            fitted.append(_as_dense(op, quantize))
        elif op.opcode is Opcode.LUT_GEMM:
            layer = spec.layers[op.name]
            fitted.append(replace(op, weight_bits=layer.weight_bits, act_bits=layer.act_bits))
        else:
            fitted.append(op)
    return tuple(fitted)


def _act_bits(spec: QuantizationSpec, site: str) -> int:
    return next(layer.act_bits for layer in spec.layers.values() if layer.site == site)


def refuse_foreign(spec: QuantizationSpec, where: str) -> None:
    """Refuse what transformers runs and the accelerator does not.

    Raises:
        InputError: activations or a cache that the accelerator would not hold so.
    """
    odd = next((name for name, layer in spec.layers.items() if not layer.quantizes_activations), None)
    if odd is not None:
        raise InputError(
            f"{where}: {odd} leaves its activations as they are, and the accelerator multiplies quantized ones only; "
            "quantize with --act-bits 1 to 4 and without head_bits"
        )
    if spec.cache is not None:
        raise InputError(
            f"{where}: its keys and values are quantized, and the accelerator keeps them in FP16; "
            "quantize without kv_bits"
        )


def _as_dense(gemm: Operation, quantize: Operation) -> Operation:
    return replace(gemm, opcode=Opcode.DENSE_GEMM, sources=quantize.sources, weight_bits=0, act_bits=0, outliers=0)


def _check_layers(gemms: dict[str, Operation], spec: QuantizationSpec, where: str) -> None:
    for name, layer in spec.layers.items():
        if name not in gemms:
            raise InputError(f"{where}: the model has no layer {name} to be quantized; {_CURE}")
        due, found = (gemms[name].K, gemms[name].N), (layer.in_features, layer.out_features)
        if due != found:
            raise InputError(f"{where}: {name} has K, N = {found}, the configuration asks for {due}; {_CURE}")
