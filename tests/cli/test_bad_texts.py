"""Texts that cannot be used: status 3, one line, whether to calibrate or to evaluate on."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import parquet

from tests.conftest import Chain


@pytest.fixture
def all_refuse(refused: Callable[..., str], chain: Chain) -> Callable[[object, str], None]:
    """Every command that reads a text says the same."""

    def run(text: object, said: str) -> None:
        for args in (
            ("calibrate", chain.model, "--dataset", text, "--samples", 1, "--seqlen", 64, "--out", "new/calibration"),
            ("eval", chain.model, "--ppl", text, "--seqlen", 64),
            ("eval", chain.image, "--ppl", text, "--seqlen", 64),
            ("simulate", chain.image, "--decode", 4, "--functional", "--seqlen", 64, "--ppl", text),
            ("run", "demo-tiny", "--model", chain.model, "--out", "new", "--set", f"eval.ppl=[{text}]"),
            ("run", "demo-tiny", "--model", chain.model, "--out", "new", "--set", f"calibrate.dataset={text}"),
        ):
            assert said in refused(*args), args

    return run


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "empty.txt: holds no text"),
        ("blank.txt", b" \n\n\t\n", "blank.txt: holds no text"),
        ("empty.jsonl", b"", "empty.jsonl: holds no text"),
        ("utf16.txt", "text".encode("utf-16"), "utf16.txt: not UTF-8 text"),
        ("binary.txt", b"text\xff\n", "binary.txt: not UTF-8 text"),
        ("binary.jsonl", b'{"text": "\xff"}\n', "binary.jsonl: not UTF-8 text"),
        ("half.jsonl", b'{"text": "a"}\n{\n', "half.jsonl, line 2: not JSON"),
        ("list.jsonl", b"[1]\n", "list.jsonl, line 1: not a JSON object (list)"),
        ("fields.jsonl", b'{"a": 1, "b": "x", "c": "y"}\n', 'fields.jsonl, line 1: no field "text"'),
        ("number.jsonl", b'{"text": 3}\n', 'number.jsonl, line 1: no field "text" with a string'),
        ("hole.jsonl", b'{"text": "a"}\n{"text": null}\n', 'hole.jsonl, line 2: field "text" holds no string'),
        ("fake.parquet", b"PAR1", "fake.parquet: not a sound Parquet file"),
    ],
)
def test_files_that_hold_no_text(
    all_refuse: Callable[..., None], workspace: Path, name: str, content: bytes, said: str
) -> None:
    (workspace / name).write_bytes(content)
    all_refuse(name, said)


def test_tables_that_hold_no_text(all_refuse: Callable[..., None], workspace: Path) -> None:
    parquet.write_table(arrow.table({"text": arrow.array([], arrow.string())}), workspace / "none.parquet")
    all_refuse("none.parquet", "none.parquet: holds no text")
    parquet.write_table(arrow.table({"n": [1, 2]}), workspace / "numbers.parquet")
    all_refuse("numbers.parquet", 'numbers.parquet: no field "text"')


def test_a_text_that_is_missing(all_refuse: Callable[..., None], workspace: Path) -> None:
    all_refuse("missing.txt", "missing.txt: no such file; check the path")
    all_refuse("wikitext", "wikitext: no such file, and not a known text (embedded, wikitext2, ptb, c4) or a hub id")
    (workspace / "folder").mkdir()
    all_refuse("folder", "folder: a folder, not a text; name one file (.txt, .jsonl or .parquet) in it")


def test_a_text_shorter_than_a_window_says_how_many_tokens_there_are(
    refused: Callable[..., str], workspace: Path, chain: Chain, result_of: Callable[..., dict[str, object]]
) -> None:
    (workspace / "short.txt").write_text("one two three\n")
    for args in (
        ("calibrate", chain.model, "--dataset", "short.txt", "--samples", 1, "--seqlen", 64, "--out", "o"),
        ("eval", chain.quantized, "--ppl", "short.txt", "--seqlen", 64),
    ):
        line = refused(*args)
        assert "short.txt: its " in line
        assert "tokens are fewer than the seqlen of 64; take a longer text or a shorter seqlen" in line
        tokens = int(line.split("its ")[1].split(" ")[0])
        assert 3 <= tokens <= 14  # a word has a token at least, a character (newline included) one at most
    # exactly that many tokens are a window, and one more is not
    found = result_of("eval", chain.quantized, "--ppl", "short.txt", "--seqlen", tokens)
    assert found["perplexity"][0]["tokens"] == tokens - 1  # type: ignore[index]
    refused("eval", chain.quantized, "--ppl", "short.txt", "--seqlen", tokens + 1)


def test_fewer_windows_than_samples_are_no_reason_to_go_on_with_less(
    refused: Callable[..., str], workspace: Path, chain: Chain
) -> None:
    (workspace / "text.txt").write_text("one two three\n" * 100)
    line = refused("calibrate", chain.model, "--dataset", "text.txt", "--samples", 128, "--seqlen", 64, "--out", "o")
    assert "128 samples of 64 tokens asked for" in line
