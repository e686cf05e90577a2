"""Does every shipped example run as a user would run it, and say what it promises?"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import oasis_cli
from oasis_cli.models.checkpoint import open_checkpoint
from oasis_cli.models.safetensors_files import read_header
from tests.conftest import Chain

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))


def run(name: str, *args: object) -> str:
    """Standard output of an example, run by a Python of its own with every warning an error."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(oasis_cli.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    call = [sys.executable, "-W", "error", "-W", "ignore:builtin type:DeprecationWarning", FOLDER / name, *args]
    found = subprocess.run(list(map(str, call)), capture_output=True, text=True, check=False, env=environment)
    assert (found.returncode, found.stderr) == (0, "")
    return found.stdout


def quantize_in_python(chain: Chain, tmp_path: Path) -> None:
    """Before and after are apart, quantized folder and image are not."""
    printed = run("quantize_in_python.py", "--out", tmp_path / "run")
    original, quantized, image = (float(x) for x in re.findall(r"perplexity of the \w+: ([0-9.]+)", printed))
    assert original < quantized < 1.5 * original
    assert image == quantized
    assert printed.split("\n\n")[1].startswith("The statement")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"calibration", "quantized", "image"}


def design_space(chain: Chain, tmp_path: Path) -> None:
    """Without the memory in the way, half the lines take nearly twice the cycles (§IV-A: the lines share N)."""
    printed = run("design_space.py", "--lines", "4", "8", "64", "--decode", "16")
    rows = [line.split() for line in printed.splitlines()[2:]]
    cycles = {int(row[0]): int(row[1].replace(",", "")) for row in rows}
    assert cycles[4] / cycles[8] == pytest.approx(2, rel=0.02)
    assert cycles[8] / cycles[64] < 8
    assert [row[3] for row in rows][:2] == ["0.0%", "0.0%"]


def inspect_image(chain: Chain, tmp_path: Path) -> None:
    """One block of the toy has 19 operations; three more lie outside. The LUT is that of the layer named."""
    layer = "model.layers.3.mlp.down_proj"
    printed = run("inspect_image.py", chain.image, layer)
    program, _, lut = printed.partition(layer + ": LUT")
    assert sum("->" in line for line in program.splitlines()) == 22
    rows = [[float(entry) for entry in line.split()] for line in lut.splitlines()[1:]]
    assert [len(row) for row in rows] == [16] * 16
    # products of two ascending codebooks: every row is the first one times a number, and ascends or descends
    assert all(row in (sorted(row), sorted(row, reverse=True)) for row in rows)


def train_tiny_model(chain: Chain, tmp_path: Path) -> None:
    """Two steps make a model of the right form; the shipped one took six hundred, on the text of another Python."""
    run("train_tiny_model.py", "--steps", 2, "--threads", 1, "--out", tmp_path / "tiny")
    made, shipped = open_checkpoint(tmp_path / "tiny"), open_checkpoint(chain.model)
    assert made.config.to_diff_dict() == shipped.config.to_diff_dict()
    assert read_header(*made.weight_files) == read_header(*shipped.weight_files)
    assert len(made.load_tokenizer()) == made.config.vocab_size
    # and another family, on texts of one's own
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("The quick brown fox jumps over the lazy dog, again and again. " * 400)
    texts = ("--text", tmp_path / "one.txt", "--text", tmp_path / "two.txt")
    sizes = ("--family", "qwen2", "--hidden", 32, "--mlp", 48, "--blocks", 2, "--vocabulary", 300)
    run("train_tiny_model.py", *sizes, *texts, "--steps", 1, "--threads", 1, "--out", tmp_path / "other")
    other = open_checkpoint(tmp_path / "other")
    assert (other.config.model_type, other.config.hidden_size, other.config.vocab_size) == ("qwen2", 32, 300)
    assert "a Qwen2 of" in (tmp_path / "other" / "README.md").read_text()
    assert "one.txt and two.txt" in (tmp_path / "other" / "README.md").read_text()


CHECKS: dict[str, Callable[[Chain, Path], None]] = {
    f"{check.__name__}.py": check for check in (quantize_in_python, design_space, inspect_image, train_tiny_model)
}


def test_every_example_is_here() -> None:
    assert sorted(CHECKS) == EXAMPLES, "an example without a check, or a check without its example"


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, chain: Chain, tmp_path: Path) -> None:
    CHECKS[name](chain, tmp_path)


def test_the_demo_script_leaves_the_user_where_he_stands(tmp_path: Path) -> None:
    """Its environment is set up in the project, paths among its arguments are the user's; stand-ins say who called."""
    project, user = tmp_path / "the project", tmp_path / "user"
    for folder in (project / "examples", project / ".venv" / "bin", user):
        folder.mkdir(parents=True)
    shutil.copy(FOLDER / "demo.sh", project / "examples")
    for name in ("python", "oasis"):
        script = project / ".venv" / "bin" / name
        script.write_text(f'#!/bin/sh\necho "{name} in $(pwd): $*"\n')
        script.chmod(0o755)
    command = ["bash", "../the project/examples/demo.sh", "--tiny", "--out", "mine"]
    said = subprocess.run(command, cwd=user, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert said[0].startswith(f"python in {user}: -m pip install ")
    assert said[0].endswith(f"--editable {project}")
    assert said[1] == f"oasis in {user}: demo --tiny --out mine"
    # with CDPATH, cd prints where it went
    call, searched = ["bash", "the project/examples/demo.sh"], os.environ | {"CDPATH": str(tmp_path)}
    again = subprocess.run(call, cwd=tmp_path, env=searched, capture_output=True, text=True, timeout=60, check=True)
    assert again.stdout.splitlines()[1] == f"oasis in {tmp_path}: demo"
