"""Commands called wrongly: status 2, one line that names the option as it was typed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Chain

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["quantise"], "No such command 'quantise'. Did you mean 'quantize'?"),
        (["evaluate"], "Did you mean 'eval'?"),
        (["frobnicate"], "No such command 'frobnicate'."),
        (["--nonsense"], "No such option '--nonsense'"),
        (["-q"], "Missing command"),
        (["calibrate", "m", "--out", "o", "--sampels", "3"], "Did you mean '--samples'?"),
        (["calibrate", "--out", "o"], "Missing argument 'MODEL'"),
        (["calibrate", "m"], "Missing option '--out'"),
        (["calibrate", "m", "n", "--out", "o"], "unexpected extra argument"),
        (["quantize", "m", "--out", "o"], "Missing option '--calibration'"),
        (["compile", "q", "--out", "o", "--emit", "elf"], "'elf' is not 'hex'"),
        (["simulate"], "name an image, or a model's sizes with --shape"),
        (["simulate", "im", "--shape", "llama-2-7b"], "one of the two"),
        (["simulate", "--shape", "llama-2-7b", "--functional"], "--functional needs an image"),
        (["simulate", "im", "--reference", "q"], "--reference goes with --functional"),
        (["simulate", "im", "--functional", "--limit", "0"], "--limit"),
        (["simulate", "im", "--functional", "--engine", "fast"], "'counted', 'gathered'"),
        (["simulate", "im", "--weight-bits", "3"], "--weight-bits, --act-bits and --outliers go with --shape"),
        (["simulate", "im", "--act-bits", "4"], "go with --shape: an image has its own"),
        (["simulate", "im", "--outliers", "0.005"], "go with --shape: an image has its own"),
        (["run"], "Missing argument 'RECIPE'"),
        (["run", "w4a4"], "name the model and the place: --model and --out"),
        (["run", "w4a4", "--model", "m"], "--out"),
        (["run", "w4a4", "--set", "foo"], "--set foo: expected key=value, as in quantize.act_bits=3"),
        (["run", "w4a4", "--set", "=3"], "--set =3: expected key=value"),
        (["demo", "--tiny", "--model", "m"], "--tiny and --model exclude each other"),
        (["calibrate", "m", "--out", "o", "--threads", "0"], "--threads"),
        (["calibrate", "m", "--out", "o", "--threads", "1000000000"], "--threads"),
        (["eval", "m", "--threads", "1025"], "1025 is not in the range 1<=x<=1024"),
    ],
)
def test_wrong_calls(refused: Refused, args: list[str], said: str) -> None:
    assert said in refused(*args, status=2)


def test_the_line_says_where_to_look(refused: Refused) -> None:
    assert "(see oasis calibrate --help)" in refused("calibrate", "--nonsense", status=2)
    assert "(see oasis --help)" in refused("--nonsense", status=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--samples", "0"], "--samples: "),
        (["--samples", "-3"], "greater than or equal to 1, got -3"),
        (["--samples", "many"], "--samples"),
        (["--seqlen", "1"], "--seqlen: "),
        (["--seed", "-1"], "--seed: "),
        (["--outliers", "0.6"], "--outliers: input should be less than or equal to 0.5, got 0.6"),
        (["--outliers", "-0.1"], "--outliers: "),
        (["--outliers", "nan"], "--outliers: "),
        (["--scale-kind", "max"], "--scale-kind: input should be 'absmax', 'rms', 'mean_abs' or 'inlier_absmax'"),
        (["--samples", "0", "--seqlen", "0"], "--seqlen: "),
    ],
)
def test_impossible_calibration_settings(refused: Refused, options: list[str], said: str) -> None:
    assert said in refused("calibrate", "m", "--out", "o", *options, status=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--weight-bits", "0"], "--weight-bits: "),
        (["--weight-bits", "5"], "--weight-bits: must be one of 1, 2, 3, 4 for oasis-plus, got 5"),
        (["--act-bits", "5"], "--act-bits: "),
        (["--outliers", "0.51"], "--outliers: "),
        (["--method", "gptq"], "--method: input should be 'oasis-plus', 'oasis', 'oasis-s', 'rtn', "),
        (["--codebook-grid", "int4"], "--codebook-grid: input should be 'int8' or 'fp16'"),
        (["--seed", "-1"], "--seed: "),
    ],
)
def test_impossible_quantization_settings(refused: Refused, options: list[str], said: str) -> None:
    assert said in refused("quantize", "m", "--calibration", "c", "--out", "o", *options, status=2)


@pytest.mark.parametrize(
    "options",
    [
        ["--batch", "0"],
        ["--decode", "-1"],
        ["--prefill", "-1"],
        ["--weight-bits", "5"],
        ["--act-bits", "0"],
        ["--outliers", "0.7"],
    ],
)
def test_impossible_simulation_settings(refused: Refused, options: list[str]) -> None:
    assert options[0] in refused("simulate", "--shape", "llama-2-7b", *options, status=2)


@pytest.mark.parametrize("options", [["--limit", "0"], ["--limit", "-1"], ["--seqlen", "1"], ["--seqlen", "x"]])
def test_impossible_evaluation_settings(refused: Refused, options: list[str]) -> None:
    assert options[0] in refused("eval", "m", *options, status=2)


@pytest.mark.parametrize("name", ["cuda:99", "banana", "mps:7"])
def test_a_device_that_is_not_there(refused: Refused, chain: Chain, name: str) -> None:
    assert f"--device {name}: not to be had" in refused("eval", chain.model, "--device", name)
    assert "take cpu or auto" in refused("calibrate", chain.model, "--out", "o", "--device", name)


def test_more_than_there_can_be(refused: Refused, chain: Chain) -> None:
    """Nothing is allocated for it first."""
    many = 10**12
    calibrate = ("calibrate", chain.model, "--out", "o", "--seqlen", 64)
    assert "fewer samples or" in refused(*calibrate, "--samples", many)
    assert "seed: " in refused(*calibrate, "--samples", 1, "--seed", many**3)
    assert "512 positions" in refused("calibrate", chain.model, "--out", "o", "--seqlen", many)
    assert "512 positions" in refused("eval", chain.model, "--seqlen", many)
    assert "512 positions" in refused("simulate", chain.image, "--decode", many)
    assert "512 positions" in refused("simulate", chain.image, "--functional", "--seqlen", many)


def test_more_steps_than_memory_holds(refused: Refused, workspace: Path) -> None:
    """Of a shape whose positions go on for ever."""
    shape = "hidden: 64, intermediate: 128, blocks: 1, heads: 1, kv_heads: 1, head_dim: 64, vocab: 100"
    (workspace / "endless.yaml").write_text(f"{{name: endless, {shape}, tied: true, max_positions: {10**13}}}\n")
    line = refused("simulate", "--shape", "endless.yaml", "--decode", 10**12)
    assert "at most 10,000,000 steps can be timed; ask for fewer" in line
