import math
from pathlib import Path

import pytest
import torch

from oasis_cli.errors import InputError
from oasis_cli.pipeline.artifacts import Kind
from oasis_cli.pipeline.evaluating import evaluate, open_logits
from oasis_cli.pipeline.settings import EvaluationSettings
from tests.conftest import Chain

TOKENS = torch.arange(3, 27)[None]


def test_whatever_yields_logits_is_opened_by_one_call(chain: Chain) -> None:
    original, quantized, image = (open_logits(path) for path in (chain.model, chain.quantized, chain.image))
    assert [each.kind for each in (original, quantized, image)] == [Kind.MODEL, Kind.QUANTIZED, Kind.IMAGE]
    assert {each.vocabulary for each in (original, quantized, image)} == {original.vocabulary}
    assert {each.positions for each in (original, quantized, image)} == {512}
    with torch.no_grad():
        found = [each.logits(TOKENS) for each in (original, quantized, image)]
    assert {each.shape for each in found} == {(1, 24, original.vocabulary)}
    assert (found[2] - found[1]).norm() <= 1e-5 * found[1].norm()
    assert (found[1] - found[0]).norm() > 1e-3 * found[0].norm()
    assert len({each.digest for each in (original, quantized, image)}) == 3


def test_a_calibration_yields_none(chain: Chain) -> None:
    with pytest.raises(InputError, match="a calibration yields no logits"):
        open_logits(chain.calibration)


def test_texts_in_the_order_given_and_their_digests(chain: Chain, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"{name} certain text about nothing in particular. " * 30)
    names = tuple(str(tmp_path / f"{name}.txt") for name in ("b", "a"))
    found = evaluate(chain.model, EvaluationSettings(ppl=names, seqlen=32, limit=2))
    assert tuple(each.data for each in found.perplexities) == names
    assert list(found.inputs) == ["model", *names]
    assert len({*found.inputs.values()}) == 3
    for each in found.perplexities:
        assert each.value == pytest.approx(math.exp(each.nll_mean))
        assert each.windows == 2


def test_windows_beyond_the_positions(chain: Chain) -> None:
    with pytest.raises(InputError, match="has 512 positions, fewer than the seqlen of 513"):
        evaluate(chain.model, EvaluationSettings(seqlen=513))
    evaluate(chain.model, EvaluationSettings(seqlen=512, limit=1))
