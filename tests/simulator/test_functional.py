"""Does the simulated accelerator give the very bits of the torch path?

The other side is transformers' own model in float32, its linear layers replaced by the reference GEMM.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from oasis_cli.compiler.compile import compile_model
from oasis_cli.compiler.plan import plan_image
from oasis_cli.compiler.source import open_quantized
from oasis_cli.errors import InputError
from oasis_cli.formats.image import write_image
from oasis_cli.formats.image_metadata import ImageTarget
from oasis_cli.formats.program import Opcode, Operation, encode_program
from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.gemm import ActivationFormat, QuantizedWeight, oasis_linear
from oasis_cli.numerics.outlier_count import outlier_count
from oasis_cli.simulator.functional import FunctionalSimulator


class ReferenceLinear(nn.Module):
    def __init__(self, fmt: ActivationFormat, weight: QuantizedWeight) -> None:
        super().__init__()
        self.fmt, self.weight = fmt, weight

    def forward(self, x: Tensor) -> Tensor:
        return oasis_linear(x, self.fmt, self.weight)


def reference_model(builder: ModuleType, recipe: Any) -> nn.Module:
    """transformers' model of the recipe, every quantized layer computed by the reference GEMM."""
    tensors, layers = builder.quantized_tensors(recipe)
    model = AutoModelForCausalLM.from_config(builder.model_config(recipe), attn_implementation="sdpa").float().eval()
    quantized = tuple(f"{name}." for name in layers)
    dense = {name: tensor.float() for name, tensor in tensors.items() if not name.startswith(quantized)}
    missing, unexpected = model.load_state_dict(dense, strict=False)
    assert not unexpected
    assert all(name.startswith(quantized) or name == "lm_head.weight" for name in missing)
    for name, layer in layers.items():
        weight_step, act_step = tensors[f"{name}.codebook_steps"].tolist()
        K = layer["in_features"]
        packed = tensors[f"{name}.weight"]
        index = torch.stack((packed & 15, packed >> 4), 2).flatten(1)[:, :K]
        fmt = ActivationFormat(
            Codebook(tensors[f"{name}.act_codebook"], act_step),
            recipe.scale_kind,
            outlier_count(K, recipe.outlier_fraction) if recipe.outlier_mode == "dynamic" else 0,
            tensors.get(f"{name}.act_thresholds"),
        )
        codebook = Codebook(tensors[f"{name}.weight_codebook"], weight_step)
        weight = QuantizedWeight(index, codebook, tensors[f"{name}.weight_scale"], tensors.get(f"{name}.bias"))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, ReferenceLinear(fmt, weight))
    return model


def some_tokens(length: int = 19, vocab: int = 40) -> Tensor:
    return torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def compiled(builder: ModuleType, tmp_path: Path) -> Callable[[Any], Path]:
    def build(recipe: Any) -> Path:
        folder = builder.write_quantized(tmp_path / "quantized", recipe)
        compile_model(folder, tmp_path / "image", "oasis-28nm")
        return tmp_path / "image"

    return build


LLAMA3 = (
    ("rope_type", "llama3"),
    ("rope_theta", 500000.0),
    ("factor", 8.0),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 16),
)
VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"biased": True},
    "qwen2": {"model_type": "qwen2", "hidden": 32},
    "mistral": {"model_type": "mistral"},
    "untied bfloat16": {"tied": False, "dtype": torch.bfloat16},
    "every head its own": {"kv_heads": 4},
    "A3": {"act_bits": 3},
    "W1A2": {"weight_bits": 1, "act_bits": 2},
    "static": {"outlier_mode": "static"},
    "no outliers": {"outlier_mode": "none"},
    "half of all are outliers": {"outlier_fraction": 0.5},
    "inlier scale": {"scale_kind": "inlier_absmax"},
    "rms scale": {"scale_kind": "rms"},
    "mean scale": {"scale_kind": "mean_abs"},
    "scaled positions": {"rope": LLAMA3},
    "layers left alone": {"left_alone": ("self_attn.k_proj", "mlp.down_proj")},
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_bits_of_the_torch_path(builder: ModuleType, compiled: Callable[[Any], Path], variation: str) -> None:
    recipe = builder.Recipe(**VARIATIONS[variation])
    image, tokens = compiled(recipe), some_tokens()
    with torch.no_grad():
        expected = reference_model(builder, recipe)(tokens).logits
    assert torch.equal(FunctionalSimulator(image, "counted").logits(tokens), expected)
    assert torch.equal(FunctionalSimulator(image, "gathered").logits(tokens), expected)


def test_bits_of_the_torch_path_on_one_token(builder: ModuleType, compiled: Callable[[Any], Path]) -> None:
    recipe = builder.Recipe()
    with torch.no_grad():
        expected = reference_model(builder, recipe)(some_tokens(1)).logits
    assert torch.equal(FunctionalSimulator(compiled(recipe)).logits(some_tokens(1)), expected)


def test_float16_grid_agrees(builder: ModuleType, compiled: Callable[[Any], Path]) -> None:
    """Sums of float16 entries are not integers: the reference is good to 1e-10 before it is rounded."""
    recipe = builder.Recipe(codebook_grid="fp16")
    image, tokens = compiled(recipe), some_tokens()
    with torch.no_grad():
        expected = reference_model(builder, recipe)(tokens).logits
    counted = FunctionalSimulator(image, "counted").logits(tokens)
    assert torch.equal(counted, FunctionalSimulator(image, "gathered").logits(tokens))
    assert float((counted - expected).norm() / expected.norm()) < 1e-5


def test_observer_sees_every_operation(builder: ModuleType, compiled: Callable[[Any], Path]) -> None:
    seen: list[tuple[Operation, dict[str, Tensor]]] = []
    simulator = FunctionalSimulator(compiled(builder.Recipe()), observer=lambda op, named: seen.append((op, named)))
    logits = simulator.logits(some_tokens(5))
    assert tuple(op for op, _ in seen) == simulator.operations
    assert torch.equal(seen[-1][1]["output"], logits)
    gemm, named = next(item for item in seen if item[0].opcode is Opcode.LUT_GEMM)
    assert named["input.index"].shape == (5, gemm.K)
    assert named["input.outliers"].sum(1).tolist() == [2 * gemm.outliers] * 5
    assert bool(((named["input.residual"] != 0) <= named["input.outliers"]).all())
    _, attention = next(item for item in seen if item[0].opcode is Opcode.ATTENTION)
    assert set(attention) == {"query", "key", "value", "output"}


def test_an_operation_runs_alone(builder: ModuleType, compiled: Callable[[Any], Path]) -> None:
    simulator = FunctionalSimulator(compiled(builder.Recipe()))
    norm = next(op for op in simulator.operations if op.opcode is Opcode.NORM)
    x = torch.randn(1, 3, norm.N)
    y = simulator.execute(norm, {norm.sources[0]: x}, some_tokens(3))
    assert isinstance(y, Tensor)
    assert y.shape == x.shape


def outputs(image: Path, **options: Any) -> list[tuple[Operation, Tensor]]:
    """Every float output of a window, in order."""
    seen: list[tuple[Operation, Tensor]] = []

    def keep(op: Operation, named: dict[str, Tensor]) -> None:
        seen.extend((op, value) for name, value in named.items() if name == "output")

    FunctionalSimulator(image, observer=keep, **options).logits(some_tokens())
    return seen


def first_gemm(seen: list[tuple[Operation, Tensor]]) -> Tensor:
    return next(value for op, value in seen if op.opcode is Opcode.LUT_GEMM)


def test_half_precision_buffers_round_what_they_store(builder: ModuleType, compiled: Callable[[Any], Path]) -> None:
    image = compiled(builder.Recipe())
    exact, rounded = outputs(image), outputs(image, buffers="fp16")
    assert torch.equal(rounded[0][1], exact[0][1].half().float())
    assert all(torch.equal(value, value.half().float()) for _, value in rounded)
    assert not torch.equal(rounded[-1][1], exact[-1][1])


def test_half_precision_sums_stay_close(builder: ModuleType, compiled: Callable[[Any], Path]) -> None:
    """Before any index flips for it: 2**-11 a step, over a tree of five levels and eight cycles."""
    image = compiled(builder.Recipe())
    exact, rounded = first_gemm(outputs(image)), first_gemm(outputs(image, accumulate="fp16"))
    assert not torch.equal(rounded, exact)
    assert float((rounded - exact).norm() / exact.norm()) < 13 * 2**-11
    with pytest.raises(ValueError, match="only the counted engine"):
        FunctionalSimulator(image, "gathered", accumulate="fp16")
    with pytest.raises(ValueError, match="engine must be"):
        FunctionalSimulator(image, "guessed")  # type: ignore[arg-type]


def test_a_window_beyond_sliding_attention_is_refused(builder: ModuleType, compiled: Callable[[Any], Path]) -> None:
    simulator = FunctionalSimulator(compiled(builder.Recipe(model_type="mistral")))
    assert simulator.logits(some_tokens(32)).shape == (1, 32, 40)
    with pytest.raises(InputError, match="33 tokens exceeds"):
        simulator.logits(some_tokens(33))


@pytest.mark.parametrize(
    "tokens", [torch.tensor([[40]]), torch.tensor([[-1]]), torch.tensor([1]), torch.zeros(1, 0, dtype=torch.int64)]
)
def test_impossible_tokens_are_a_bug(builder: ModuleType, compiled: Callable[[Any], Path], tokens: Tensor) -> None:
    simulator = FunctionalSimulator(compiled(builder.Recipe(blocks=1)))
    with pytest.raises(ValueError, match="tokens must"):
        simulator.logits(tokens)


def test_a_register_must_hold_what_the_operation_takes(builder: ModuleType, compiled: Callable[[Any], Path]) -> None:
    simulator = FunctionalSimulator(compiled(builder.Recipe(blocks=1)))
    gemm = next(op for op in simulator.operations if op.opcode is Opcode.LUT_GEMM)
    with pytest.raises(ValueError, match="no quantized tokens"):
        simulator.execute(gemm, {gemm.sources[0]: torch.zeros(1, 2, gemm.K)}, some_tokens(2))


def test_an_unknown_kind_of_norm_is_refused(builder: ModuleType, tmp_path: Path) -> None:
    folder = open_quantized(builder.write_quantized(tmp_path / "quantized", builder.Recipe(blocks=1)))
    plan = plan_image(folder, ImageTarget("t", 4, 32), {})
    program = [replace(op, variant="layer") if op.opcode is Opcode.NORM else op for op in plan.operations]
    changed = replace(plan.drafts[0], chunks=lambda: [encode_program(program)])
    write_image(tmp_path / "model.oimg", [changed, *plan.drafts[1:]])
    with pytest.raises(InputError, match="input_layernorm is of kind 'layer'"):
        FunctionalSimulator(tmp_path)


def test_a_damaged_image_does_not_run(builder: ModuleType, compiled: Callable[[Any], Path]) -> None:
    image = compiled(replace(builder.Recipe(), blocks=1))
    file = image / "model.oimg"
    data = bytearray(file.read_bytes())
    data[-5000] ^= 4
    file.write_bytes(data)
    with pytest.raises(InputError, match="run oasis compile again"):
        FunctionalSimulator(image)
