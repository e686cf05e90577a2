import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from oasis_cli.data import hub
from oasis_cli.data.embedded import embedded_text
from oasis_cli.data.hub import HubText, parse_hub_id
from oasis_cli.data.text import load_text
from oasis_cli.errors import InputError


class Hub:
    """Stands for `datasets.load_dataset`: hands out `rows` and remembers what it was asked for."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.asked: tuple[Any, ...] = ()

    def __call__(self, path: str, config: str | None, data_files: dict[str, str] | None, split: str) -> Any:
        self.asked = (path, config, data_files, split)
        return datasets.Dataset.from_dict(self.columns)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    def serve(**columns: list[Any]) -> Hub:
        served = Hub(**columns)
        monkeypatch.setattr(datasets, "load_dataset", served)
        return served

    return serve


@pytest.mark.parametrize("spec", [None, "embedded"])
def test_nothing_named_means_the_embedded_part_for_the_purpose(spec: str | None) -> None:
    assert load_text(spec, "calibration") == embedded_text("calibration")
    assert load_text(spec, "evaluation") == embedded_text("evaluation")


def test_a_file_is_called_as_the_user_called_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    monkeypatch.chdir(tmp_path)
    source = load_text("a.txt", "evaluation")
    assert (source.name, source.text) == ("a.txt", "one\n\n\ntwo\n")
    assert load_text(tmp_path / "a.txt", "calibration").digest == source.digest


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    assert load_text("~/a.txt", "evaluation").documents == ("one",)


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", ""), ("a.txt", " \n\t\n"), ("a.jsonl", '{"text": " "}'), ("b.jsonl", "")]
)
def test_a_file_without_text_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match="holds no text"):
        load_text(tmp_path / name, "evaluation")


@pytest.mark.parametrize("spec", ["gone/wiki.raw", "/gone/from/here", "./gone", "~/gone", "gone.parquet", "x" * 5000])
def test_what_looks_like_a_path_is_not_sought_on_the_hub(serve: Any, spec: str) -> None:
    served = serve(text=["one"])
    with pytest.raises(InputError, match=r"no such file|cannot be read"):
        load_text(spec, "evaluation")
    assert served.asked == ()


@pytest.mark.parametrize("spec", ["wikitext", "a/b/c", "owner/name:a:b:c", "owner/name:a b", ""])
def test_an_unknown_name_is_answered_with_the_known_ones(spec: str) -> None:
    with pytest.raises(InputError, match=r"wikitext2, ptb, c4|a folder"):
        load_text(spec, "evaluation")


def test_wikitext2_reads_the_split_of_its_purpose(serve: Any) -> None:
    served = serve(text=["", " = Title = \n", ""])
    assert load_text("wikitext2", "evaluation").text == "\n\n = Title = \n\n\n"
    assert served.asked == ("Salesforce/wikitext", "wikitext-2-raw-v1", None, "test")
    load_text("wikitext2", "calibration")
    assert served.asked[-1] == "train"


def test_c4_reads_1100_documents_of_the_first_validation_file(serve: Any) -> None:
    """As get_c4_new of GPTQ's datautils.py does."""
    served = serve(text=["a"] * 1200, url=["u"] * 1200)
    source = load_text("c4", "evaluation")
    assert source.text == " ".join(["a"] * 1100)
    assert served.asked == ("allenai/c4", None, {"validation": "en/c4-validation.00000-of-00008.json.gz"}, "validation")


def test_ptb_joins_its_sentences_with_spaces(serve: Any) -> None:
    """As get_ptb_new of GPTQ's datautils.py does."""
    serve(sentence=["no it was n't black monday", "but"])
    assert load_text("ptb", "evaluation").text == "no it was n't black monday but"


def test_calibration_reads_no_more_than_it_can_need(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "CALIBRATION_CHARACTERS", 5)
    serve(text=["abc", "def", "ghi"])
    assert load_text("owner/name", "calibration").documents == ("abc", "def")
    assert load_text("owner/name", "evaluation").documents == ("abc", "def", "ghi")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("owner/name", HubText("owner/name", "test")),
        ("owner/na.me-2:en", HubText("owner/na.me-2", "test", "en")),
        ("owner/name:en:validation", HubText("owner/name", "validation", "en")),
        ("owner/name::validation", HubText("owner/name", "validation")),
        ("name", None),
        ("owner/name:en:", None),
        ("owner/../name", None),
    ],
)
def test_hub_ids(spec: str, expected: HubText | None) -> None:
    assert parse_hub_id(spec, "evaluation") == expected


def test_a_data_set_without_a_text_names_its_fields(serve: Any) -> None:
    serve(question=["q"], answer=["a"])
    with pytest.raises(InputError, match=r"owner/name: no field .*\(fields: question, answer\)"):
        load_text("owner/name", "evaluation")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("unreachable\nsecond line"),
        ValueError("no such split"),
        RuntimeError("script"),
        FileNotFoundError("x"),
    ],
)
def test_an_unreachable_hub_points_at_a_local_file(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        InputError, match=r"^wikitext2: cannot be read .*give the path of a local file instead"
    ) as caught:
        load_text("wikitext2", "evaluation")
    assert "\n" not in str(caught.value)


def test_wikitext_as_published_has_the_rows_of_the_hub() -> None:
    """The hub's test split has 4358 rows; the file's own lines, blank ones emptied, are those rows."""
    if "OASIS_DATA" not in os.environ:
        pytest.skip("OASIS_DATA names no folder with data/wikitext2/wiki.test.raw")
    path = Path(os.environ["OASIS_DATA"]) / "data/wikitext2/wiki.test.raw"
    lines = path.read_bytes().decode().split("\n")
    rows = [line + "\n" if line.strip() else "" for line in lines[:-1]]
    assert lines[-1] == ""
    assert len(rows) == 4358
    assert load_text(path, "evaluation").text == "\n\n".join(rows)
