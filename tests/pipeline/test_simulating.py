import shutil
from pathlib import Path

import pytest

from oasis_cli.errors import InputError
from oasis_cli.pipeline.settings import SimulationSettings
from oasis_cli.pipeline.shapes import simulate_shape
from oasis_cli.pipeline.simulating import run_functional, simulate_image
from tests.conftest import Chain


def test_the_papers_gemm_through_the_whole_stage() -> None:
    """§V-D3: 1-4096-4096 in W4A4 takes 2048 cycles on the main branch, and the outlier branch about 33 % less."""
    found = simulate_shape("llama-2-7b", SimulationSettings(decode=1))
    query = next(layer for layer in found.operations if layer.name.endswith("q_proj"))
    assert (query.M, query.K, query.N, query.main_cycles) == (1, 4096, 4096, 2048)
    assert 0.32 <= 1 - query.outlier_cycles / query.main_cycles <= 0.35


def test_an_image_is_timed_for_its_own_target_or_another(chain: Chain) -> None:
    options = SimulationSettings(decode=4)
    own, digest = simulate_image(chain.image, options)
    named, _ = simulate_image(chain.image / "model.oimg", options, "oasis-28nm")
    assert own == named
    assert digest.startswith("sha256:")


def test_lengths_beyond_the_positions(chain: Chain) -> None:
    simulate_image(chain.image, SimulationSettings(prefill=500, decode=12))
    with pytest.raises(InputError, match="512 positions"):
        simulate_image(chain.image, SimulationSettings(prefill=500, decode=13))
    with pytest.raises(InputError, match="512 positions"):
        run_functional(chain.image, seqlen=513)


def test_a_damaged_reference_is_told_from_a_wrong_one(chain: Chain, tmp_path: Path) -> None:
    """A flipped weight index: the folder still loads, but it is not what the image holds."""
    folder = Path(shutil.copytree(chain.quantized, tmp_path / "copy"))
    shard = folder / "model-00003-of-00005.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match=r"differs from .*copy.*--reference"):
        run_functional(chain.image, seqlen=16, reference=folder)
