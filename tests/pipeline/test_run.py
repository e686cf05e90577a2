import shutil
from pathlib import Path

import pytest

from oasis_cli.errors import InputError
from oasis_cli.pipeline.recipe import find_recipe, load_recipe
from oasis_cli.pipeline.run import run_recipe
from tests.conftest import Chain


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "calibrate.seqlen=513",
            r"has 512 positions, .* take a shorter calibrate\.seqlen, in the recipe or with --set",
        ),
        ("eval.seqlen=513", r"has 512 positions, .* take a shorter eval\.seqlen, in the recipe or with --set"),
        ("simulate.decode=513", "has 512 positions"),
        ("compile.target=none", "target 'none' is not known"),
        ("eval.ppl=[none.txt]", "no such file"),
        ("quantize.outlier_fraction=0.1", "give both the same"),
    ],
)
def test_the_future_is_looked_at_before_anything_runs(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, said: str
) -> None:
    def work(*args: object, **options: object) -> None:
        raise AssertionError("a stage ran")

    monkeypatch.setattr("oasis_cli.pipeline.run.calibrate", work)
    with pytest.raises(InputError, match=said):
        run_recipe(load_recipe(find_recipe("demo-tiny"), (change,)), str(chain.model), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_text_too_short_to_evaluate_on_is_found_first(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    recipe = load_recipe(find_recipe("demo-tiny"), (f"eval.ppl=[{tmp_path / 'short.txt'}]",))
    with pytest.raises(InputError, match="tokens are fewer than the seqlen of 256"):
        run_recipe(recipe, str(chain.model), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_result_is_what_the_stages_left(chain: Chain, tmp_path: Path) -> None:
    """The calibration and the quantized folder are the session's, so that only the later stages run."""
    changes = ("calibrate={samples: 4, seqlen: 128}", "eval={seqlen: 64, limit: 1}", "simulate.decode=4")
    for name in ("calibration", "quantized"):
        shutil.copytree(getattr(chain, name), tmp_path / name)
    found = run_recipe(load_recipe(find_recipe("demo-tiny"), changes), str(chain.model), tmp_path)
    assert (found.calibration.seconds, found.quantization.seconds) == (0, 0)
    assert (tmp_path / "image" / "model.oimg").read_bytes() == (chain.image / "model.oimg").read_bytes()
    assert found.image_bytes == (tmp_path / "image" / "model.oimg").stat().st_size
    assert list(found.seconds)[-5:] == ["quantize", "compile", "simulate", "eval original", "eval quantized"]
    assert (found.original["kind"], found.quantized["kind"]) == ("model", "quantized model")
