import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from oasis_cli.data.source import TextSource
from oasis_cli.data.windows import adds_bos, calibration_windows, encode, token_windows
from oasis_cli.errors import InputError


class Counting:
    """A tokenizer that gives every character its place as its token."""

    bos_token_id = None

    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text)))}


def text_of(length: int) -> TextSource:
    return TextSource("some.txt", ("x" * length,))


def letters(bos: bool, context: int = 4) -> PreTrainedTokenizerFast:
    """A real tokenizer: a-z are 1-26 and <s> is 0, put before every text if `bos`."""
    vocabulary = {"<s>": 0} | {letter: 1 + n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="z"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", model_max_length=context)


def test_windows_lie_side_by_side_from_the_start() -> None:
    windows = token_windows(text_of(11), Counting(), seqlen=4)
    assert windows.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows.tokens.dtype == torch.int64
    assert (windows.total_tokens, windows.seqlen, windows.data) == (11, 4, "some.txt")
    assert windows.digest == text_of(11).digest


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (2, 2), (5, 2), (None, 2)])
def test_limit_counts_windows(limit: int | None, expected: int) -> None:
    assert len(token_windows(text_of(11), Counting(), seqlen=4, limit=limit).tokens) == expected


def test_a_text_of_exactly_one_window_is_enough() -> None:
    assert token_windows(text_of(4), Counting(), seqlen=4).tokens.tolist() == [[0, 1, 2, 3]]


def test_a_text_shorter_than_a_window_is_refused_with_both_counts() -> None:
    with pytest.raises(InputError, match=r"some\.txt: its 3 tokens are fewer than the seqlen of 4; take a longer text"):
        token_windows(text_of(3), Counting(), seqlen=4)
    with pytest.raises(InputError, match=r"some\.txt: its 3 tokens are fewer"):
        calibration_windows(text_of(3), Counting(), samples=1, seqlen=4, seed=0)


@given(st.integers(2, 200), st.integers(2, 9), st.integers(0, 2**63 - 1), st.data())
def test_samples_are_different_windows_of_the_stream(length: int, seqlen: int, seed: int, data: Any) -> None:
    length = max(length, seqlen)
    samples = data.draw(st.integers(1, length // seqlen))
    tokens = calibration_windows(text_of(length), Counting(), samples, seqlen, seed).tokens
    every = token_windows(text_of(length), Counting(), seqlen).tokens.tolist()
    assert tokens.shape == (samples, seqlen)
    assert len({row[0] for row in tokens.tolist()}) == samples
    assert all(row in every for row in tokens.tolist())


def test_the_seed_decides_and_fewer_samples_are_the_first_of_more() -> None:
    def draw(samples: int, seed: int) -> list[list[int]]:
        return calibration_windows(text_of(400), Counting(), samples, 4, seed).tokens.tolist()

    assert draw(16, 7) == draw(16, 7) != draw(16, 8)
    assert draw(16, 7)[:5] == draw(5, 7)


def test_the_draw_leaves_the_global_generators_alone() -> None:
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    calibration_windows(text_of(400), Counting(), 16, 4, seed=3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(np.random.get_state()))  # noqa: NPY002


def test_too_few_windows_are_an_error_with_the_counts() -> None:
    with pytest.raises(InputError, match=r"3 samples of 4 tokens asked for, but its 11 tokens give 2; take a longer"):
        calibration_windows(text_of(11), Counting(), samples=3, seqlen=4, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples: 0"),
        ({"samples": -1}, "samples: -1"),
        ({"seqlen": 1}, "seqlen: 1"),
        ({"seqlen": 0}, "seqlen: 0"),
        ({"seed": -1}, "seed: -1"),
        ({"seed": 2**63}, "seed: 9223372036854775808"),
    ],
)
def test_settings_without_sense_are_refused(changes: dict[str, int], message: str) -> None:
    settings = {"samples": 1, "seqlen": 4, "seed": 0} | changes
    with pytest.raises(InputError, match=message):
        calibration_windows(text_of(11), Counting(), **settings)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="limit: 0"):
        token_windows(text_of(11), Counting(), seqlen=4, limit=0)


@pytest.mark.parametrize("bos", [True, False])
def test_the_beginning_of_sequence_token_is_told_and_counted(bos: bool) -> None:
    windows = token_windows(TextSource("t", ("abcde",)), letters(bos), seqlen=3)
    assert windows.bos is bos
    assert windows.tokens[0].tolist() == ([0, 1, 2] if bos else [1, 2, 3])
    assert windows.total_tokens == 5 + bos
    assert ("with a beginning" if bos else "without a beginning") in windows.protocol


def test_a_tokenizer_that_knows_no_such_token_adds_none() -> None:
    assert not adds_bos(Counting())


def test_a_text_beyond_the_models_context_raises_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = letters(bos=False, context=4)
    with caplog.at_level(logging.DEBUG):
        encode(TextSource("t", ("a" * 100,)), tokenizer)
    assert caplog.messages == []


def test_tokens_the_model_does_not_know_are_refused() -> None:
    encode(text_of(10), Counting(), vocab_size=10)
    with pytest.raises(InputError, match=r"some\.txt: the tokenizer gives token 9, but the model knows only 9 tokens"):
        encode(text_of(10), Counting(), vocab_size=9)


def test_rows_are_joined_before_they_are_tokenized() -> None:
    stream, _ = encode(TextSource("t", ("ab", "c"), separator="d"), letters(bos=False))
    assert stream.tolist() == [1, 2, 4, 3]
