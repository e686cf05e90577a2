"""The method that goes beyond the paper's, on the toy model: what it gains, and that nothing is left to chance."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

from oasis_cli.errors import InputError
from oasis_cli.formats.calibration import read_calibration
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.gemm import ActivationFormat, QuantizedWeight, quantize_activations
from oasis_cli.quantization import QuantizationSettings, quantize
from oasis_cli.quantization.fake_quant import TunedLinear, TunedSite, _Gather, _QuantizeSite
from oasis_cli.quantization.folder import BlockFiles
from oasis_cli.runtime.loading import load
from tests.conftest import Chain

CPU = torch.device("cpu")
PLUS = {"feedback_samples": 2, "tune_epochs": 2.0, "tune_seqlen": 64, "tune_batch": 2}


def divergence(chain: Chain, folder: Path) -> float:
    """Mean KL from the original on the calibration's tokens, through the runtime's own layers, in plain torch."""
    tokens = read_calibration(chain.calibration).tokens
    checkpoint = open_checkpoint(chain.model)
    with torch.no_grad():
        wanted = checkpoint.load_model(dtype=torch.float32)(input_ids=tokens).logits.log_softmax(-1)
        found = load(folder)(input_ids=tokens).logits.float().log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def run(chain: Chain, out: Path, resume: bool = False, **changes: object) -> Path:
    settings = QuantizationSettings(**(PLUS | changes))  # type: ignore[arg-type]
    quantize(open_checkpoint(chain.model), out, chain.calibration, settings, resume=resume)
    return out


@pytest.fixture(scope="module")
def plus(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(chain, tmp_path_factory.mktemp("plus") / "q")


def test_every_ingredient_brings_the_model_nearer_to_the_original(chain: Chain, plus: Path, tmp_path: Path) -> None:
    paper = divergence(chain, chain.quantized)
    fed_back = divergence(chain, run(chain, tmp_path / "a", refit_samples=0, tune_epochs=0))
    refitted = divergence(chain, run(chain, tmp_path / "b", tune_epochs=0))
    tuned = divergence(chain, plus)
    assert max(fed_back, refitted) < 0.85 * paper
    assert tuned < min(fed_back, refitted)
    report = json.loads((plus / "quantization_report.json").read_text())["tuning"]
    assert report["steps"] == 8
    assert 0 < report["divergence_after"] < report["divergence_before"]


def test_nothing_at_all_is_the_papers_method(chain: Chain, tmp_path: Path) -> None:
    found = run(chain, tmp_path / "q", feedback_samples=0, refit_samples=0, tune_epochs=0)
    for file in sorted(chain.quantized.glob("*.safetensors")):
        assert (found / file.name).read_bytes() == file.read_bytes()


def test_the_same_seed_gives_the_same_bytes(chain: Chain, plus: Path, tmp_path: Path) -> None:
    again = run(chain, tmp_path / "q")
    for file in sorted(plus.glob("*.safetensors")):
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_indices_are_those_before_tuning_and_norms_alone_move_besides(chain: Chain, plus: Path, tmp_path: Path) -> None:
    before, after = load(run(chain, tmp_path / "q", tune_epochs=0)).state_dict(), load(plus).state_dict()
    original = open_checkpoint(chain.model).load_model(dtype=torch.float32).state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not [name for name in moved if name.endswith((".weight_index", ".codebook_steps"))]
    unquantized = moved & original.keys()
    assert unquantized
    assert all("norm" in name for name in unquantized if torch.equal(before[name], original[name]))


@pytest.mark.parametrize(("step", "count"), [("write_block", 4), ("replace", 1), ("replace", 3)])
def test_interrupted_between_blocks_or_while_tuned_files_are_written(
    chain: Chain, plus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, count: int
) -> None:
    go_on, calls = getattr(BlockFiles, step), []

    def break_off(self: BlockFiles, number: int, *rest: object) -> None:
        calls.append(number)
        if len(calls) == count:
            raise KeyboardInterrupt
        go_on(self, number, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(BlockFiles, step, break_off)
        with pytest.raises(KeyboardInterrupt):
            run(chain, tmp_path / "q")
    found = run(chain, tmp_path / "q", resume=True)
    for file in sorted(plus.glob("*.safetensors")):
        assert (found / file.name).read_bytes() == file.read_bytes()
    assert not list(found.glob(".*"))


def test_the_image_measures_what_the_folder_measures(cli: Callable[..., Result], plus: Path, tmp_path: Path) -> None:
    assert cli("compile", plus, "--out", tmp_path / "image").exit_code == 0
    values = []
    for target in (plus, tmp_path / "image"):
        done = cli("eval", target, "--seqlen", 128, "--limit", 2, "--json", tmp_path / "r.json")
        assert done.exit_code == 0, done.stderr
        values.append(json.loads((tmp_path / "r.json").read_text())["perplexity"][0]["value"])
    assert values[0] == values[1]


@pytest.mark.parametrize("grid", ["int8", "fp16"])
def test_the_differentiable_layer_computes_what_the_runtime_computes(grid: str) -> None:
    draw = torch.Generator().manual_seed(0)
    step = 0.0078125 if grid == "int8" else 0.0
    codebook = Codebook((torch.arange(-8, 8) * 15 * 0.0078125).half(), step)
    weight = QuantizedWeight(
        torch.randint(0, 16, (6, 40), dtype=torch.uint8, generator=draw), codebook, torch.rand(6, generator=draw).half()
    )
    fmt = ActivationFormat(codebook, "mean_abs", outliers_a_side=2)
    x = torch.randn(2, 5, 40, generator=draw)
    layer = TunedLinear(weight, torch.randn(6), TunedSite(fmt, CPU, torch.float32), CPU)
    act = quantize_activations(x.reshape(-1, 40), fmt)
    rounded = act.scale[:, None] * codebook.centroids.float()[act.index.int()]
    wanted = torch.where(act.outliers, x.reshape(-1, 40), rounded) @ weight.dequantize().T + layer.bias
    torch.testing.assert_close(layer(x).reshape(-1, 6), wanted, atol=1e-5, rtol=1e-5)


def test_gradients_of_centroids_and_scales_are_exact() -> None:
    draw = torch.Generator().manual_seed(0)
    index = torch.randint(0, 4, (5, 7), dtype=torch.uint8, generator=draw)
    codebook = torch.randn(4, dtype=torch.float64, generator=draw, requires_grad=True)
    scale = torch.rand(5, dtype=torch.float64, generator=draw, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c, s: _Gather.apply(c, s, index), (codebook, scale))


def test_gradients_pass_the_rounding_of_activations_and_leave_outliers_out_of_centroids() -> None:
    x = torch.tensor([[9.0, 0.4, -0.6, -9.0]], requires_grad=True)
    centroids = torch.tensor([-0.1, 0.1], requires_grad=True)
    fmt = ActivationFormat(Codebook(centroids.detach().half()), "mean_abs", outliers_a_side=1)
    y = _QuantizeSite.apply(x, centroids, fmt)  # the mean of magnitudes is 4.75
    assert y.tolist() == [[9.0, pytest.approx(0.475), pytest.approx(-0.475), -9.0]]
    (y * torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 2.0, 3.0, 4.0]]
    assert centroids.grad is not None
    assert centroids.grad.tolist() == [pytest.approx(3 * 4.75), pytest.approx(2 * 4.75)]


def test_a_rate_that_diverges_is_refused_and_leaves_nothing_behind(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not finite at step .*; take a smaller tune_rate, or tune_epochs=0"):
        run(chain, tmp_path / "q", tune_rate=1.0, tune_epochs=400.0)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("epochs", [3, 1], ids=["other", "default"])
def test_settings_of_refinement_are_refused_with_the_papers_methods(
    cli: Callable[..., Result], chain: Chain, tmp_path: Path, epochs: int
) -> None:
    args = ("quantize", chain.model, "--calibration", chain.calibration, "--out", tmp_path / "q")
    done = cli(*args, "--method", "oasis", "--tune-epochs", epochs)
    assert done.exit_code == 2
    assert "--tune-epochs: a setting of oasis-plus, not of oasis" in done.stderr
    assert not (tmp_path / "q").exists()


def test_presets_lie_under_options(cli: Callable[..., Result], chain: Chain, tmp_path: Path) -> None:
    """fast tunes nothing; what is given beside it counts; the paper's methods have none."""
    args = ("quantize", chain.model, "--calibration", chain.calibration)
    assert cli(*args, "--preset", "fast", "--feedback-samples", 1, "--out", tmp_path / "q").exit_code == 0
    report = json.loads((tmp_path / "q" / "quantization_report.json").read_text())
    kept = {name: report["recipe"][name] for name in ("refit_samples", "feedback_samples", "tune_epochs")}
    assert kept == {"refit_samples": 1, "feedback_samples": 1, "tune_epochs": 0}
    assert report["tuning"] is None
    done = cli(*args, "--preset", "best", "--method", "oasis", "--out", tmp_path / "r")
    assert done.exit_code == 2
    assert "--preset: a setting of oasis-plus, not of oasis" in done.stderr
    done = cli(*args, "--preset", "quick", "--out", tmp_path / "r")
    assert done.exit_code == 2
