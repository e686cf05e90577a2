import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from oasis_cli.data.windows import Windows
from oasis_cli.errors import InputError
from oasis_cli.evaluation.perplexity import perplexity


def windows_of(tokens: Tensor) -> Windows:
    return Windows(tokens, tokens.numel(), bos=False, data="some.txt", digest="sha256:0", separator="\n\n")


def random_tokens(windows: int, seqlen: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (windows, seqlen), generator=torch.Generator().manual_seed(1))


def bigram(vocabulary: int, spread: float = 2.0) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A model that looks one token back: its table, float32 [V, V], and its logits."""
    table = spread * torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(2))
    return table, lambda tokens: table[tokens]


def test_hand_arithmetic() -> None:
    """p = 1/4, 3/4, then 3/4, 3/4: exp of the mean of ln 4, ln 4/3, ln 4/3, ln 4/3."""
    table = torch.tensor([[1.0, 3.0], [3.0, 1.0]]).log()
    result = perplexity(lambda tokens: table[tokens], windows_of(torch.tensor([[0, 0, 1], [1, 0, 1]])))
    assert result.value == pytest.approx((4 * (4 / 3) ** 3) ** 0.25)
    assert (result.tokens, result.windows, result.seqlen) == (4, 2, 3)
    first, second = math.log(4 * 4 / 3) / 2, math.log(4 / 3)
    deviation = abs(first - second) / math.sqrt(2)  # of a sample of two
    assert result.stderr == pytest.approx(result.value * deviation / math.sqrt(2), rel=1e-5)


@pytest.mark.parametrize("seqlen", [2, 256, 257, 258, 600])
def test_agrees_with_a_few_lines_of_float64(seqlen: int) -> None:
    table, logits = bigram(50)
    tokens = random_tokens(3, seqlen, 50)
    scores = table.double().numpy()
    probability = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    x = tokens.numpy()
    expected = math.exp(-np.log(probability[x[:, :-1], x[:, 1:]]).mean())
    assert perplexity(logits, windows_of(tokens)).value == pytest.approx(expected, rel=1e-6)


def test_equal_logits_give_the_size_of_the_vocabulary() -> None:
    result = perplexity(lambda tokens: torch.zeros(1, tokens.shape[1], 37), windows_of(random_tokens(4, 10, 37)))
    assert result.value == pytest.approx(37)
    assert result.stderr == pytest.approx(0, abs=1e-5)


def test_certainty_gives_one() -> None:
    cycle = torch.arange(12).remainder(3).view(1, 12)
    result = perplexity(lambda tokens: 1e4 * torch.eye(3)[(tokens + 1) % 3], windows_of(cycle))
    assert (result.value, result.stderr) == (1.0, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_type_are_summed_in_float32(dtype: torch.dtype) -> None:
    table, _ = bigram(50)
    rounded = table.to(dtype)
    windows = windows_of(random_tokens(2, 300, 50))
    exact = perplexity(lambda tokens: rounded.float()[tokens], windows).value
    assert perplexity(lambda tokens: rounded[tokens], windows).value == exact


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_broken_logits_name_the_window(poison: float) -> None:
    _, logits = bigram(5)
    calls = iter(range(3))

    def break_in_the_middle(tokens: Tensor) -> Tensor:
        scores = logits(tokens).clone()
        if next(calls) == 1:
            scores[0, 3, 2] = poison
        return scores

    with pytest.raises(InputError, match=r"some\.txt: window 1 gives logits that are NaN, infinite"):
        perplexity(break_in_the_middle, windows_of(random_tokens(3, 8, 5)))


def test_a_perplexity_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(InputError, match="window 0"):
        perplexity(lambda tokens: -1e4 * torch.eye(3)[(tokens + 1) % 3], windows_of(torch.tensor([[0, 1, 2]])))


def test_a_token_that_the_model_rules_out_does_no_harm_elsewhere() -> None:
    """Padding of the vocabulary is masked with -inf by some models."""
    windows = windows_of(torch.zeros(1, 5, dtype=torch.int64))
    assert perplexity(lambda tokens: torch.tensor([0.0, -math.inf]).expand(1, 5, 2), windows).value == 1.0


@pytest.mark.parametrize("shape", [(5, 7), (1, 4, 7), (2, 5, 7)])
def test_logits_of_another_shape_are_the_callers_mistake(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits must be \[1, 5, V\]"):
        perplexity(lambda tokens: torch.zeros(shape), windows_of(random_tokens(1, 5, 7)))


def test_a_model_worse_than_guessing_is_said_to_be_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="oasis_cli")
    tokens = random_tokens(1, 50, 4)
    perplexity(lambda tokens: -3 * torch.eye(4)[tokens.roll(-1)], windows_of(tokens))
    assert "worse than guessing among 4 tokens" in caplog.text


def test_a_model_better_than_guessing_is_not_remarked_upon(caplog: pytest.LogCaptureFixture) -> None:
    perplexity(lambda tokens: 3 * torch.eye(4)[tokens.roll(-1)], windows_of(random_tokens(1, 50, 4)))
    assert caplog.text == ""


def test_every_window_is_reported() -> None:
    heard: list[str | int] = []

    class Listener:
        @contextmanager
        def task(self, description: str, total: int, unit: str = "") -> Iterator["Listener"]:
            heard.append(f"{total} {unit}")
            yield self

        def advance(self, n: int = 1) -> None:
            heard.append(n)

    perplexity(bigram(5)[1], windows_of(random_tokens(3, 8, 5)), Listener())
    assert heard == ["3 windows", 1, 1, 1]


def test_the_result_goes_into_json_with_all_it_took() -> None:
    result = perplexity(bigram(5)[1], windows_of(random_tokens(2, 8, 5)))
    record = json.loads(json.dumps(result.to_json()))
    assert record["data"] == "some.txt"
    assert record["digest"] == "sha256:0"
    assert record["value"] == pytest.approx(math.exp(record["nll_mean"]))
    assert record["tokens"] == 2 * 7
    assert "windows of 8 tokens" in record["protocol"]
    assert set(record) == {
        *("value", "nll_mean", "stderr", "tokens", "windows", "seqlen", "bos", "data", "digest", "protocol"),
        *("window_nll", "against"),
    }
    assert record["against"] is None


def test_comparison_by_hand() -> None:
    """The reference holds both tokens for equally likely, the model gives them 1/4 and 3/4."""
    model, reference = torch.tensor([[1.0, 3.0], [1.0, 3.0]]).log(), torch.zeros(2, 2)
    windows = windows_of(torch.tensor([[0, 1, 1], [0, 0, 0]]))
    found = perplexity(lambda tokens: model[tokens], windows, reference=lambda tokens: reference[tokens]).against
    assert found is not None
    divergence = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert (found.kl_mean, found.kl_max) == (pytest.approx(divergence), pytest.approx(divergence))
    assert found.kl_stderr == pytest.approx(0, abs=1e-7)
    assert found.top1_agreement == 0  # equal logits: the first token; the model: the second
    assert found.perplexity == pytest.approx(2)
    # -ln p is ln 4/3 in the first window and ln 4 in the second, ln 2 for the reference
    differences = math.log(4 / 3) - math.log(2), math.log(4) - math.log(2)
    assert found.ratio == pytest.approx(math.exp(sum(differences) / 2))
    assert found.ratio_stderr == pytest.approx(found.ratio * abs(differences[0] - differences[1]) / 2, rel=1e-6)


def test_a_model_agrees_with_itself() -> None:
    _, logits = bigram(50)
    found = perplexity(logits, windows_of(random_tokens(3, 300, 50)), reference=logits).against
    assert found is not None
    assert (found.kl_mean, found.ratio, found.ratio_stderr, found.top1_agreement) == (0, 1, 0, 1)


def test_comparison_agrees_with_a_few_lines_of_float64() -> None:
    (table, logits), other = bigram(50), bigram(50, spread=1.0)[0].flip(0)
    tokens = random_tokens(2, 300, 50)
    found = perplexity(logits, windows_of(tokens), reference=lambda tokens: other[tokens]).against
    assert found is not None
    p, q = (np.exp(t.double().numpy()) / np.exp(t.double().numpy()).sum(axis=1, keepdims=True) for t in (other, table))
    rows = tokens.numpy()[:, :-1]
    each = (p * np.log(p / q)).sum(axis=1)[rows]
    assert (found.kl_mean, found.kl_max) == (pytest.approx(each.mean(), rel=1e-5), pytest.approx(each.max(), rel=1e-5))
    assert found.top1_agreement == pytest.approx((p.argmax(axis=1) == q.argmax(axis=1))[rows].mean())


def test_a_broken_reference_is_refused() -> None:
    _, logits = bigram(5)
    with pytest.raises(InputError, match="window 0"):
        perplexity(logits, windows_of(random_tokens(1, 8, 5)), reference=lambda tokens: logits(tokens) * math.nan)
