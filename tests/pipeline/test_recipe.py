from pathlib import Path

import pytest

from oasis_cli.errors import InputError
from oasis_cli.pipeline.recipe import Recipe, find_recipe, load_recipe, shipped_recipes, stage_settings


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("calibrate: {samples: 4}\nquantize: {act_bits: 3}\n")
    return path


def test_what_a_recipe_leaves_out_has_its_default(recipe: Path) -> None:
    found = load_recipe(recipe)
    assert (found.calibrate.samples, found.quantize.act_bits) == (4, 3)
    assert (found.calibrate.seqlen, found.quantize.weight_bits, found.eval.limit) == (2048, 4, None)
    assert found.simulate == Recipe().simulate


def test_changes_are_laid_over_in_their_order(recipe: Path) -> None:
    changes = ("calibrate.samples=8", "eval={limit: 2}", "eval.seqlen=64", "calibrate.samples=9", "out=a=b")
    found = load_recipe(recipe, changes)
    assert found.calibrate.samples == 9
    assert (found.eval.limit, found.eval.seqlen) == (2, 64)
    assert found.out == "a=b"
    assert found.quantize.act_bits == 3


def test_changes_are_read_as_the_file_is(recipe: Path) -> None:
    """5e-3 is a number and 010 is not, in either."""
    assert load_recipe(recipe, ("calibrate.outlier_fraction=5e-3",)).calibrate.outlier_fraction == 0.005
    with pytest.raises(InputError, match=r"^--set calibrate\.samples=010: "):
        load_recipe(recipe, ("calibrate.samples=010",))
    assert load_recipe(recipe, ("eval.ppl=[a.txt, b.txt]",)).eval.ppl == ("a.txt", "b.txt")
    assert load_recipe(recipe, ("quantize.outlier_fraction=",)).quantize.outlier_fraction is None


def test_a_mistake_in_the_file_is_not_laid_on_a_change(recipe: Path) -> None:
    recipe.write_text("calibrate: {samples: none}\n")
    with pytest.raises(InputError, match=r"mine\.yaml: line 1: calibrate\.samples"):
        load_recipe(recipe, ("calibrate.samples=4",))


def test_a_file_wins_over_a_shipped_recipe_of_the_same_name(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_recipe("w4a4") == shipped_recipes()["w4a4"]
    monkeypatch.chdir(tmp_path)
    recipe.rename(tmp_path / "w4a4")
    assert find_recipe("w4a4") == Path("w4a4")


def test_no_recipe_means_all_defaults() -> None:
    assert stage_settings(None) == Recipe()
    assert stage_settings(Path("w4a3")).quantize.act_bits == 3
