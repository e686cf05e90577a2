"""The whole chain by commands: what each leaves is all that the next one needs, and all ways of running it agree."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.cli.conftest import contents, process_environment
from tests.conftest import Chain

Done = Callable[..., Result]
ResultOf = Callable[..., dict[str, Any]]

BY_HAND = """
import math, sys
import oasis_cli
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, file, seqlen, windows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
text = open(file, encoding="utf-8").read()
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
nll = []
for number in range(windows):
    window = tokens[number * seqlen : (number + 1) * seqlen]
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([window])).logits[0].double().log_softmax(-1)
    nll += [-scores[place, token].item() for place, token in enumerate(window[1:])]
print(math.exp(math.fsum(nll) / len(nll)))
"""


def test_all_ways_of_running_give_the_same_perplexity(result_of: ResultOf, chain: Chain, workspace: Path) -> None:
    """eval of the folder, eval of the image, and somebody's own lines with from_pretrained in another process."""
    text = workspace / "text.txt"
    # one line, for between the lines of a file stand two more newlines
    text.write_text(" ".join(f"On day {n} she counted {n * n} small red stones by the lake." for n in range(40)))
    options = ("--ppl", text, "--seqlen", 96, "--limit", 4)
    folder = result_of("eval", chain.quantized, *options)["perplexity"][0]
    image = result_of("eval", chain.image, *options)["perplexity"][0]
    command = [sys.executable, "-W", "ignore", "-c", BY_HAND, str(chain.quantized), str(text), "96", "4"]
    by_hand = subprocess.run(
        command, env=process_environment(), capture_output=True, text=True, timeout=120, check=True
    )
    assert folder["tokens"] == image["tokens"] == 4 * 95
    assert image["value"] == pytest.approx(folder["value"], rel=1e-6)
    assert float(by_hand.stdout) == pytest.approx(folder["value"], rel=1e-6)
    assert result_of("eval", chain.model, *options)["perplexity"][0]["value"] != pytest.approx(
        folder["value"], rel=1e-3
    )


def test_stages_need_nothing_but_the_folder_before_them(
    done: Done, result_of: ResultOf, one_block: Path, copy_of: Callable[..., Path], workspace: Path
) -> None:
    model = copy_of(one_block, "model")
    done("calibrate", model, "--samples", 2, "--seqlen", 64, "--out", "a/calibration")
    done("quantize", model, "--calibration", "a/calibration", "--out", "b/quantized")
    (workspace / "model").rename(workspace / "gone")
    (workspace / "a").rename(workspace / "gone too")
    done("compile", "b/quantized", "--out", "c/image")
    value = result_of("eval", "b/quantized", "--seqlen", 64, "--limit", 1)["perplexity"][0]["value"]
    (workspace / "b").rename(workspace / "gone as well")
    (workspace / "c" / "image").rename(workspace / "moved")
    done("simulate", "moved", "--decode", 4)
    done("verify", "moved")
    assert result_of("eval", "moved", "--seqlen", 64, "--limit", 1)["perplexity"][0]["value"] == pytest.approx(value)


def test_the_same_call_gives_the_same_bytes(done: Done, chain: Chain, workspace: Path) -> None:
    """Of the other stages test_interruption.py shows as much."""
    done("compile", chain.quantized, "--out", "image")
    assert contents(workspace / "image") == contents(chain.image)


@pytest.mark.parametrize(
    ("calibrate", "quantize"),
    [
        (("--outliers", 0.02), ("--weight-bits", 2, "--act-bits", 3)),
        (("--samples", 2), ("--weight-bits", 1, "--act-bits", 1)),
        (("--seed", 7), ("--method", "oasis-s")),
        ((), ("--codebook-grid", "fp16", "--act-bits", 2)),
        (("--scale-kind", "inlier_absmax"), ("--method", "oasis")),
        ((), ("--scale-kind", "inlier_absmax", "--tune-epochs", 2)),
        (("--scale-kind", "rms", "--outliers", 0), ("--method", "oasis-s")),
        (("--scale-kind", "mean_abs", "--outliers", 0.3), ("--method", "oasis")),
    ],
)
def test_every_setting_goes_through_the_chain(
    done: Done,
    result_of: ResultOf,
    one_block: Path,
    workspace: Path,
    calibrate: tuple[object, ...],
    quantize: tuple[object, ...],
) -> None:
    """What is asked for is what the image says, and the image agrees with torch to the bit."""
    done("calibrate", one_block, "--samples", 1, "--seqlen", 64, "--out", "calibration", *calibrate)
    done("quantize", one_block, "--calibration", "calibration", "--out", "quantized", *quantize)
    done("compile", "quantized", "--out", "image")
    done("verify", "quantized", "--against", one_block)
    done("verify", "image", "--against", "quantized")
    args = ("simulate", "image", "--decode", 4, "--functional", "--seqlen", 24, "--reference", "quantized")
    agreement = result_of(*args)["functional"]["agreement"]
    assert (agreement["index_flips"], agreement["outlier_flips"], agreement["layer_error"]) == (0, 0, 0)
    assert math.isfinite(agreement["perplexity"])
    said = json.loads((workspace / "image" / "image.json").read_text())["recipe"]["quantization"]
    for option, value in zip((*calibrate, *quantize)[::2], (*calibrate, *quantize)[1::2], strict=True):
        name = str(option).removeprefix("--").replace("-", "_").replace("outliers", "outlier_fraction")
        assert said.get(name, value) == value  # samples and seeds leave no trace in an image


def test_a_token_of_outliers_alone_is_refused(refused: Callable[..., str], one_block: Path) -> None:
    """Half of the values a side are outliers: allowed, but nothing is left to learn a codebook from."""
    args = ("calibrate", one_block, "--samples", 1, "--seqlen", 64, "--out", "new/out", "--outliers", 0.5)
    assert "calibration saw nothing but zeros and outliers; use another text, or fewer outliers" in refused(*args)


def test_compile_emits_every_section_as_text(done: Done, chain: Chain, workspace: Path) -> None:
    """One element a line; a section's lines, read back, are its bytes in the image."""
    done("compile", chain.quantized, "--out", "image", "--emit", "hex")
    described = json.loads((workspace / "image" / "image.json").read_text())
    image = (workspace / "image" / "model.oimg").read_bytes()
    files = sorted((workspace / "image" / "hex").iterdir())
    assert len(files) == len(described["sections"])
    widths = {"u8": 1, "i16": 2, "f16": 2, "bf16": 2, "f32": 4}
    for file, section in zip(files, described["sections"], strict=True):
        assert file.name.endswith(f"-{section['name']}.hex")
        lines = file.read_text().splitlines()
        assert {len(line) for line in lines} == {2 * widths[section["dtype"]]}
        data = b"".join(bytes.fromhex(line)[::-1] for line in lines)  # the image is little-endian
        assert data == image[section["offset"] : section["offset"] + section["length"]]
    assert contents(chain.image).items() <= contents(workspace / "image").items()


def test_overwrite_replaces_a_result_of_the_same_kind(
    done: Done, result_of: ResultOf, one_block: Path, workspace: Path
) -> None:
    done("calibrate", one_block, "--samples", 1, "--seqlen", 64, "--out", "calibration")
    args = ("quantize", one_block, "--calibration", "calibration", "--out", "out")
    first = result_of(*args)["relative_error"]
    second = result_of(*args, "--weight-bits", 2, "--overwrite")["relative_error"]
    assert second > 5 * first
    assert sorted(path.name for path in workspace.iterdir()) == ["calibration", "out"]
    done("verify", "out")


def test_settings_come_from_a_recipe_and_options_win(done: Done, one_block: Path, workspace: Path) -> None:
    recipe = "calibrate: {samples: 1, seqlen: 32, scale_kind: rms}\nquantize: {act_bits: 3, seed: 7}\n"
    (workspace / "mine.yaml").write_text(recipe)
    done("calibrate", one_block, "--recipe", "mine.yaml", "--seqlen", 48, "--out", "calibration")
    said = json.loads((workspace / "calibration" / "calibration.json").read_text())["recipe"]
    assert (said["samples"], said["seqlen"], said["scale_kind"], said["seed"]) == (1, 48, "rms", 0)
    options = ("--recipe", "mine.yaml", "--seed", 0)
    done("quantize", one_block, "--calibration", "calibration", *options, "--out", "quantized")
    said = json.loads((workspace / "quantized" / "quantization_report.json").read_text())["recipe"]
    assert (said["act_bits"], said["seed"], said["weight_bits"]) == (3, 0, 4)
