"""The chain on a real model: perplexity against a figure measured elsewhere, and the same by every way to run it."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors import safe_open

from oasis_cli.calibration.fisher import visit_sites
from oasis_cli.calibration.statistics import SiteStatistics
from oasis_cli.data.text import load_text
from oasis_cli.data.windows import token_windows
from oasis_cli.formats.calibration import read_calibration
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.models.sites import find_sites
from oasis_cli.numerics.kmeans import Line
from oasis_cli.quantization.baselines.equivalences import rotate_model
from tests.conftest import Chain

pytestmark = pytest.mark.real_model


def perplexity_of(cli: Callable[..., Result], target: Path, tmp_path: Path, *options: object) -> dict:
    result = cli("eval", target, *options, "--json", tmp_path / "result.json", "-q")
    assert result.exit_code == 0, result.stderr
    found: dict = json.loads((tmp_path / "result.json").read_text())["perplexity"][0]
    return found


def test_wikitext2_perplexity_of_the_original(
    cli: Callable[..., Result], smollm2: Path, shared_data: Path, tmp_path: Path
) -> None:
    """19.13 on the first 8 windows of 2048, of 304,986 tokens: measured without this project."""
    text = shared_data / "data" / "wikitext2" / "wiki.test.raw"
    found = perplexity_of(cli, smollm2, tmp_path, "--ppl", text, "--limit", 8)
    assert found["value"] == pytest.approx(19.13, abs=0.05)
    assert (found["windows"], found["tokens"], found["bos"]) == (8, 8 * 2047, False)
    tokens = token_windows(load_text(text, "evaluation"), open_checkpoint(smollm2).load_tokenizer(), 2048)
    assert tokens.total_tokens == 304_986


def test_one_perplexity_by_every_way(cli: Callable[..., Result], smollm2_chain: Chain, tmp_path: Path) -> None:
    """Folder, from_pretrained and image: the same bits, so the same figure to the last digit."""
    options = ("--seqlen", 256, "--limit", 1)
    folder = perplexity_of(cli, smollm2_chain.quantized, tmp_path, *options)
    image = perplexity_of(cli, smollm2_chain.image, tmp_path, *options)
    assert image["value"] == folder["value"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_chain.quantized, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_chain.quantized)
    ids = tokenizer(load_text(None, "evaluation").text, verbose=False, return_tensors="pt")["input_ids"][:, :256]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].log_softmax(-1)
    loss = -logits.gather(1, ids[0, 1:, None]).double().mean().item()
    assert math.exp(loss) == pytest.approx(folder["value"], rel=1e-6)


def test_quantization_hurts_but_does_not_destroy(
    cli: Callable[..., Result], smollm2: Path, smollm2_chain: Chain, tmp_path: Path
) -> None:
    options = ("--seqlen", 512, "--limit", 4)
    before = perplexity_of(cli, smollm2, tmp_path, *options)["value"]
    after = perplexity_of(cli, smollm2_chain.quantized, tmp_path, *options)["value"]
    assert before < after < 6 * before


def test_oasis_plus_loses_much_less_in_the_same_format(
    cli: Callable[..., Result], smollm2: Path, smollm2_chain: Chain, tmp_path: Path
) -> None:
    """On the evaluation part of the embedded text; what the two folders hold has the same names, shapes and dtypes."""
    args = ("--calibration", smollm2_chain.calibration, "--feedback-samples", 2, "--out", tmp_path / "plus", "-q")
    done = cli("quantize", smollm2, *args, "--json", tmp_path / "plus.json")
    assert done.exit_code == 0, done.stderr
    tuning = json.loads((tmp_path / "plus.json").read_text())["tuning"]
    assert tuning["divergence_after"] < tuning["divergence_before"]
    options = ("--seqlen", 512, "--limit", 4)
    before, paper, plus = (
        math.log(perplexity_of(cli, target, tmp_path, *options)["value"])
        for target in (smollm2, smollm2_chain.quantized, tmp_path / "plus")
    )
    assert before < plus < before + 0.6 * (paper - before)
    rotated = ("--method", "quarot", "--calibration", smollm2_chain.calibration, "--feedback-samples", 2)
    assert cli("quantize", smollm2, *rotated, "--out", tmp_path / "quarot", "-q").exit_code == 0
    assert plus < math.log(perplexity_of(cli, tmp_path / "quarot", tmp_path, *options)["value"])
    for file in sorted(smollm2_chain.quantized.glob("*.safetensors")):
        with safe_open(file, "pt") as one, safe_open(tmp_path / "plus" / file.name, "pt") as other:
            assert sorted(one.keys()) == sorted(other.keys())
            for name in one.keys():  # noqa: SIM118 - not a dict
                mine, its = one.get_slice(name), other.get_slice(name)
                assert (mine.get_shape(), mine.get_dtype()) == (its.get_shape(), its.get_dtype())


def test_rotated_it_is_the_same_model(smollm2: Path) -> None:
    """Widths 576 = 36 * 16 and 1536 = 12 * 128: the residual stream folded, o_proj and down_proj as the model runs."""
    checkpoint = open_checkpoint(smollm2)
    model, tokens = checkpoint.load_model(), torch.randint(0, 49152, (1, 32))
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        assert len(rotate_model(model, 0, layers)) == 2 * 30
        after = model(input_ids=tokens).logits
    assert float((after - before).norm() / before.norm()) < 1e-4
    assert not torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)


def test_counted_image_agrees_with_torch_layer_by_layer(
    cli: Callable[..., Result], smollm2_chain: Chain, tmp_path: Path
) -> None:
    """The literal engine: counts of concatenated indices, tournament trees; every one of 210 layers."""
    result = cli(
        *("simulate", smollm2_chain.image, "--decode", 16, "--functional", "--reference", smollm2_chain.quantized),
        *("--seqlen", 32, "--json", tmp_path / "result.json", "-q"),
    )
    assert result.exit_code == 0, result.stderr
    agreement = json.loads((tmp_path / "result.json").read_text())["functional"]["agreement"]
    assert agreement["layers"] == 210
    assert (agreement["index_flips"], agreement["outlier_flips"]) == (0, 0)
    assert agreement["layer_error"] <= 1e-5
    assert agreement["kl_mean"] <= 1e-6


def test_verified_against_where_they_came_from(cli: Callable[..., Result], smollm2_chain: Chain) -> None:
    for args in (
        (smollm2_chain.calibration, "--against", smollm2_chain.model),
        (smollm2_chain.quantized,),
        (smollm2_chain.image, "--against", smollm2_chain.quantized),
    ):
        result = cli("verify", *args)
        assert result.exit_code == 0, result.stderr


def test_centroids_are_within_half_a_percent_of_the_best(smollm2: Path, smollm2_chain: Chain) -> None:
    """Every site: no Lloyd run from 20 random starts finds a better codebook on the site's own histogram."""
    generator = torch.Generator().manual_seed(0)
    for site in read_calibration(smollm2_chain.calibration).sites.values():
        line = Line(site.points)
        ours = line.error(site.centroids[4].double().numpy())
        weights = torch.from_numpy(site.points.weights)
        for _ in range(20):
            drawn = torch.multinomial(weights, 16, generator=generator)
            start = torch.from_numpy(site.points.values)[drawn].sort().values.numpy()
            for _ in range(60):
                start = line.means(line.cut(start), start)
            assert ours <= 1.005 * line.error(start)


def test_fisher_pass_keeps_one_block_in_memory(smollm2: Path) -> None:
    """Sites come from the last block to the first, each with the width of its layers."""
    model = open_checkpoint(smollm2).load_model()
    sites = find_sites(model)
    assert len(sites) == 120
    seen: list[int] = []
    statistics = SiteStatistics.empty(576)

    def visit(site: object, x: torch.Tensor, gradient: torch.Tensor) -> None:
        seen.append(site.block)  # type: ignore[attr-defined]
        if x.shape[1] == 576:
            statistics.add("any", x, gradient, 0.005, "absmax")

    loss = visit_sites(model, sites, torch.randint(0, 49152, (1, 64)), visit)
    assert seen == sorted(seen, reverse=True)
    assert loss > 5  # random tokens
    assert statistics.tokens == 90 * 64
