import pytest

from oasis_cli.errors import InputError
from oasis_cli.pipeline.settings import EvaluationSettings, SimulationSettings, override


def test_options_win_and_none_means_not_given() -> None:
    before = SimulationSettings(batch=2, decode=8)
    assert override(before, {"batch": None, "decode": 0, "prefill": 4}) == SimulationSettings(2, 4, 0)
    assert before == SimulationSettings(batch=2, decode=8)


def test_names_of_other_stages_are_passed_over() -> None:
    assert override(EvaluationSettings(), {"samples": 3, "ppl": ("a",), "limit": None}).ppl == ("a",)


def test_impossible_values_name_themselves() -> None:
    with pytest.raises(InputError, match=r"^command line: batch: .* got 0; decode: .* got -1$"):
        override(SimulationSettings(), {"batch": 0, "decode": -1})


def test_a_class_is_no_instance() -> None:
    with pytest.raises(ValueError, match="takes an instance"):
        override(SimulationSettings, {})
