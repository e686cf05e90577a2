import random
import sys
from pydoc_data.topics import topics

import pytest

from oasis_cli.data.embedded import embedded_text, paragraphs, split_topics, topic_part
from oasis_cli.errors import InputError

LONG = "a paragraph that is long enough to betray a text that was seen before, in one line"


def long_paragraphs(documents: tuple[str, ...]) -> list[str]:
    return [" ".join(p.split()) for d in documents for p in d.split("\n\n") if len(" ".join(p.split())) >= 60]


def test_no_long_paragraph_occurs_twice() -> None:
    calibration = long_paragraphs(embedded_text("calibration").documents)
    evaluation = long_paragraphs(embedded_text("evaluation").documents)
    assert len(set(calibration)) == len(calibration) > 500
    assert len(set(evaluation)) == len(evaluation) > 200
    assert not set(calibration) & set(evaluation)


def test_parts_share_the_text_about_70_to_30() -> None:
    calibration, evaluation = (len(embedded_text(part).text) for part in ("calibration", "evaluation"))
    assert 0.2 < evaluation / (calibration + evaluation) < 0.4
    assert calibration + evaluation < sum(map(len, topics.values()))


def test_a_topic_keeps_its_part_on_every_python() -> None:
    """printf 'oasis:calls' | sha256sum, and so on; the last digit of the number in decimal."""
    assert [topic_part(name) for name in ("calls", "strings", "compound")] == ["evaluation"] * 3
    assert [topic_part(name) for name in ("types", "specialnames", "debugger")] == ["calibration"] * 3


def test_a_shared_paragraph_stays_in_the_calibration_part() -> None:
    """`calls` sorts before `types`, yet its copy is the one that goes."""
    parts = split_topics({"calls": f"own words\n\n{LONG}\n", "types": f"{LONG}\n\nmore"})
    assert parts == {"calibration": (f"{LONG}\n\nmore",), "evaluation": ("own words",)}


def test_a_copy_within_a_part_goes_and_short_paragraphs_stay() -> None:
    parts = split_topics({"debugger": f"x = 1\n\n{LONG}", "types": f"x = 1\n\n{LONG.replace(' ', chr(10), 1)}"})
    assert parts["calibration"] == (f"x = 1\n\n{LONG}", "x = 1")


def test_a_topic_without_words_of_its_own_is_no_document() -> None:
    assert split_topics({"debugger": LONG, "types": LONG, "specialnames": " \n\n"})["calibration"] == (LONG,)


def test_the_order_of_the_dictionary_does_not_matter() -> None:
    names = list(topics)
    random.Random(0).shuffle(names)
    assert split_topics({name: topics[name] for name in names}) == split_topics(topics)


@pytest.mark.parametrize("text", ["a\n\nb", "\na\n \t\nb\n\n", "a\n\n\n\nb"])
def test_blank_lines_part_paragraphs(text: str) -> None:
    assert paragraphs(text) == ["a", "b"]


def test_source_says_which_part_and_which_text() -> None:
    source = embedded_text("evaluation")
    assert source.name == "embedded (evaluation part)"
    assert source.digest.startswith("sha256:")
    assert source.digest != embedded_text("calibration").digest


def test_a_python_without_its_help_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match="lacks pydoc_data; give a text file"):
        embedded_text("evaluation")
