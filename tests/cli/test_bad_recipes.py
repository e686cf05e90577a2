"""Recipes, changes and names of shipped data that cannot be: status 3, with the line and the nearest name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Chain

Refused = Callable[..., str]


@pytest.fixture
def run(refused: Refused, chain: Chain) -> Callable[..., str]:
    """`oasis run` of a recipe, refused."""
    return lambda recipe, *options: refused("run", recipe, "--model", chain.model, "--out", "new/run", *options)


def test_unknown_recipes(run: Callable[..., str], refused: Refused, chain: Chain) -> None:
    assert "w4a: no such recipe file, and not a shipped one (" in run("w4a")
    assert "did you mean w4a4?" in run("w4a")
    assert "mine.yaml: no such recipe file" in run("mine.yaml")
    for command in (["calibrate", chain.model], ["quantize", chain.model, "--calibration", chain.calibration]):
        assert "did you mean w4a4?" in refused(*command, "--out", "o", "--recipe", "w4a")
    assert "did you mean w4a4?" in refused("eval", chain.model, "--recipe", "w4a")
    assert "did you mean w4a4?" in refused("simulate", chain.image, "--recipe", "w4a")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- 3\n", "expected keys and values at the top level, found list"),
        ("3\n", "expected keys and values at the top level, found int"),
        ("a: [\n", "not valid YAML"),
        ("a: *b\n", "not valid YAML"),
        ("out: a\nout: b\n", "line 2: out is given twice"),
        ("quantise: {}\n", "line 1: quantise is not a known key; did you mean quantize?"),
        ("calibrate:\n  sampels: 3\n", "line 2: calibrate.sampels is not a known key; did you mean samples?"),
        (
            "quantize: {weight_bits: 5}\n",
            "line 1: quantize: weight_bits: must be one of 1, 2, 3, 4 for oasis-plus, got 5",
        ),
        ("quantize: {weight_bits: '4'}\n", "quantize.weight_bits: input should be a valid integer"),
        ("quantize: 3\n", "quantize: input should be keys and values"),
        ("quantize:\n", "quantize: input should be keys and values"),
        ("quantize: {method: gptq}\n", "quantize.method: input should be 'oasis-plus', 'oasis', 'oasis-s', 'rtn', "),
        ("calibrate: {scale_kind: max}\n", "input should be 'absmax', 'rms', 'mean_abs' or 'inlier_absmax'"),
        ("eval: {limit: 0}\n", "eval.limit"),
        ("eval: {ppl: text.txt}\n", "eval.ppl: input should be a list, got 'text.txt'"),
        ("x: 1\ny: 2\n", "line 1: x is not a known key; line 2: y is not a known key"),
    ],
)
def test_bad_recipes(run: Callable[..., str], workspace: Path, text: str, said: str) -> None:
    (workspace / "mine.yaml").write_text(text)
    for options in ((), ("--set", "quantize.act_bits=3")):
        line = run("mine.yaml", *options)
        assert line.startswith("error: mine.yaml: ")
        assert said in line


def test_a_recipe_that_is_not_text(run: Callable[..., str], workspace: Path) -> None:
    (workspace / "mine.yaml").write_bytes(b"\xff\xfe")
    assert "mine.yaml: not UTF-8 text" in run("mine.yaml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("quantize.act_bit=3", "quantize.act_bit is not a known key; did you mean act_bits?"),
        ("quantize.act_bits=9", "quantize: act_bits: must be one of 1, 2, 3, 4, 16 for oasis, got 9"),
        ("quantize.act_bits.x=3", "act_bits holds a value, not keys"),
        ("quantize=3", "quantize: input should be keys and values, got 3"),
        ("eval.ppl=[a", "not valid YAML"),
        ("calibrate.samples=-1", "calibrate.samples: "),
        ("a..b=3", "a is not a known key"),
    ],
)
def test_bad_changes_are_told_from_bad_recipes(run: Callable[..., str], change: str, said: str) -> None:
    line = run("demo-tiny", "--set", "calibrate.samples=2", "--set", change)
    assert line.startswith(f"error: --set {change}: ")
    assert said in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("compile.target=oasis-28", "target 'oasis-28' is not known; did you mean oasis-28nm?"),
        ("compile.target=mine.yaml", "mine.yaml: cannot be read"),
        ("calibrate.seqlen=1024", "has 512 positions"),
        ("eval.seqlen=1024", "has 512 positions"),
        ("simulate.decode=1024", "has 512 positions"),
        ("simulate={decode: 0, prefill: 0}", "nothing to simulate"),
        ("quantize.outlier_fraction=0.01", "quantize.outlier_fraction is 0.01, calibrate.outlier_fraction 0.005"),
        ("eval.ppl=[missing.txt]", "missing.txt: no such file"),
    ],
)
def test_what_a_late_stage_would_refuse_is_refused_before_the_first(
    run: Callable[..., str], change: str, said: str
) -> None:
    """`refused` sees to it that not even the calibration was written."""
    assert said in run("demo-tiny", "--set", change)


def test_unknown_targets_and_shapes(refused: Refused, chain: Chain) -> None:
    line = refused("simulate", "--shape", "llama-2-7")
    assert "model shape 'llama-2-7' is not known; did you mean llama-2-7b?" in line
    assert "opt-6.7b" in line
    assert "did you mean oasis-28nm?" in refused("simulate", "--shape", "llama-2-7b", "--target", "oasis")
    assert "did you mean oasis-28nm?" in refused("simulate", chain.image, "--decode", 4, "--target", "oasis-28")
    assert "did you mean oasis-28nm?" in refused("compile", chain.quantized, "--out", "a/b", "--target", "oasis")
    assert "none.yaml: cannot be read" in refused("simulate", "--shape", "none.yaml")
    assert "none.yaml: cannot be read" in refused("simulate", "--shape", "llama-2-7b", "--target", "none.yaml")
