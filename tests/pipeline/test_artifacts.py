import json
from pathlib import Path

import pytest

from oasis_cli.errors import InputError
from oasis_cli.pipeline.artifacts import Kind, image_file, kind_of
from tests.conftest import Chain


def test_every_artifact_of_the_chain(chain: Chain) -> None:
    found = [kind_of(path) for path in (chain.model, chain.calibration, chain.quantized, chain.image)]
    assert found == [Kind.MODEL, Kind.CALIBRATION, Kind.QUANTIZED, Kind.IMAGE]
    assert kind_of(chain.image / "model.oimg") is Kind.IMAGE


def test_an_image_by_folder_or_by_file(chain: Chain) -> None:
    assert image_file(chain.image) == chain.image / "model.oimg"
    assert image_file(chain.image / "model.oimg") == chain.image / "model.oimg"


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model-00001-of-00002.safetensors"])
def test_weights_alone_make_a_model_so_that_its_reader_can_say_what_is_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert kind_of(tmp_path) is Kind.MODEL


def test_what_is_not_there_may_be_a_hub_id(tmp_path: Path) -> None:
    assert kind_of("someone/model") is Kind.MODEL
    assert kind_of(tmp_path) is Kind.MODEL  # an empty folder, for its reader to refuse


def test_another_tools_quantized_model_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    assert kind_of(tmp_path) is Kind.MODEL


def test_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="neither a model, a calibration, a quantized model nor an image"):
        kind_of(tmp_path)
    with pytest.raises(InputError, match="File name too long"):
        kind_of(300 * "x")
