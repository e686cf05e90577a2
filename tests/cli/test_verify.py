"""`oasis verify`: a sound artifact gives 0, any damage 1, one that belongs elsewhere 1, and what is not there 3."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from tests.conftest import Chain

Refused = Callable[..., str]
Copy = Callable[..., Path]
Done = Callable[..., Result]


def damaged(whole: bytes, flips: int, cuts: int, seed: str) -> Iterator[bytes]:
    """The file with a single bit flipped, and cut short, at places drawn at random, the very ends among them."""
    draw = random.Random(seed)
    places = [0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(flips - 2))]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        yield bytes(flipped)
    for length in (0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(cuts - 2))):
        yield whole[:length]


@pytest.fixture
def finds_all(refused: Refused) -> Callable[..., None]:
    """Damages one file of a folder in many ways; each must be found."""

    def run(folder: Path, name: str, flips: int, cuts: int = 3) -> None:
        path = folder / name
        whole = path.read_bytes()
        for number, content in enumerate(damaged(whole, flips, cuts, name)):
            path.write_bytes(content)
            assert refused("verify", folder, status=1), (name, number)
        path.unlink()
        refused("verify", folder, status=1)
        path.write_bytes(whole)

    return run


def test_every_listed_file_of_a_quantized_folder(
    finds_all: Callable[..., None], done: Done, chain: Chain, copy_of: Copy
) -> None:
    folder = copy_of(chain.quantized)
    listed = json.loads((folder / "quantization_report.json").read_text())["files"]
    assert {"config.json", "tokenizer.json", "model-00001-of-00005.safetensors"} < listed.keys()
    for name in listed:
        finds_all(folder, name, flips=5)
    finds_all(folder, "quantization_report.json", flips=12)
    done("verify", folder)


def test_every_file_of_a_calibration(
    finds_all: Callable[..., None], refused: Refused, done: Done, chain: Chain, copy_of: Copy
) -> None:
    folder = copy_of(chain.calibration)
    finds_all(folder, "calibration.safetensors", flips=12)
    finds_all(folder, "calibration.json", flips=30)
    done("verify", folder)


def test_every_file_of_an_image(
    finds_all: Callable[..., None], refused: Refused, done: Done, chain: Chain, copy_of: Copy
) -> None:
    folder = copy_of(chain.image)
    finds_all(folder, "model.oimg", flips=40, cuts=6)
    finds_all(folder, "image.json", flips=20)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        finds_all(folder, name, flips=4)
    done("verify", folder)
    (folder / "tokenizer.json").unlink()
    assert "copy/tokenizer.json: not found; run oasis compile again" in refused("verify", folder, status=1)
    assert "no tokenizer files; copy tokenizer.json of the model" in refused("eval", folder, "--seqlen", 64)


def test_every_bit_of_an_images_header(refused: Refused, done: Done, chain: Chain, copy_of: Copy) -> None:
    """Of the image alone: nothing beside it is looked at."""
    image = copy_of(chain.image) / "model.oimg"
    whole = image.read_bytes()
    for bit in range(0, 8 * 64, 3):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        image.write_bytes(flipped)
        refused("verify", image, status=1)
    image.write_bytes(whole)
    done("verify", image)


def test_sound_ones(done: Done, chain: Chain) -> None:
    for path, kind in (
        (chain.model, "model"),
        (chain.calibration, "calibration"),
        (chain.quantized, "quantized model"),
        (chain.image, "image"),
    ):
        assert f"sound {kind}" in done("verify", path).stdout.replace("\n", " ")


def test_sound_ones_against_where_they_came_from(done: Done, chain: Chain) -> None:
    for path, against in (
        (chain.calibration, chain.model),
        (chain.quantized, chain.model),
        (chain.image, chain.quantized),
    ):
        said = done("verify", path, "--against", against).stdout
        assert said.count("\n") > done("verify", path).stdout.count("\n")


@pytest.fixture
def stranger(done: Done, one_block: Path, copy_of: Copy, workspace: Path) -> Chain:
    """Another model, taken through the chain."""
    model = copy_of(one_block, "stranger")
    found = Chain(model, workspace / "c", workspace / "q", workspace / "i")
    done("calibrate", model, "--samples", 1, "--seqlen", 64, "--out", found.calibration)
    done("quantize", model, "--calibration", found.calibration, "--out", found.quantized, "--weight-bits", 2)
    done("compile", found.quantized, "--out", found.image)
    return found


def test_against_another_model(refused: Refused, chain: Chain, stranger: Chain) -> None:
    for path, against in (
        (chain.calibration, stranger.model),
        (chain.quantized, stranger.model),
        (stranger.calibration, chain.model),
        (stranger.quantized, chain.model),
    ):
        assert f"{path}: was made from another model than {against}" in refused(
            "verify", path, "--against", against, status=1
        )
    for image, quantized in ((chain.image, stranger.quantized), (stranger.image, chain.quantized)):
        assert f"than {quantized}" in refused("verify", image, "--against", quantized, status=1)


def test_what_is_not_there_is_bad_input(refused: Refused, chain: Chain) -> None:
    assert "missing: not found; name a folder or a file" in refused("verify", "missing")
    assert "missing: not found" in refused("verify", chain.image, "--against", "missing")
    assert "leave out --against" in refused("verify", chain.model, "--against", chain.quantized)
    assert "the model is not quantized" in refused("verify", chain.image, "--against", chain.model)
    assert "no config.json" in refused("verify", chain.quantized, "--against", chain.calibration)


def test_a_folder_of_something_else(refused: Refused, workspace: Path) -> None:
    (workspace / "thesis.tex").write_text("mine")
    said = "neither a model, a calibration, a quantized model nor an image; name one of these"
    assert said in refused("verify", workspace, status=1)
