"""Files that a quantized folder carries so that it explains, and loads, itself."""

from typing import Any, Final

MODELING_FILE: Final = "modeling_oasis.py"


def modeling_source(architecture: str) -> str:
    """The folder's `modeling_oasis.py`, for loading with `trust_remote_code=True` and no import of `oasis_cli`.

    The class keeps the name of the one it extends, so that config.json names the same architecture either way.

    Args:
        architecture: class name of the original model, such as `LlamaForCausalLM`.

    Raises:
        ValueError: not a class name.
    """
    if not architecture.isidentifier():
        raise ValueError(f"{architecture!r} is not the name of a class")
    return f'''"""Loads this model, which oasis-cli quantized: pip install oasis-cli."""

import transformers

import oasis_cli.runtime.transformers_plugin


class {architecture}(transformers.{architecture}):
    """The model as transformers knows it, once the oasis quantization method is known too."""
'''


def auto_map(architecture: str) -> dict[str, Any]:
    """The `auto_map` entry of config.json that leads to `modeling_oasis.py`."""
    return {"AutoModelForCausalLM": f"{MODELING_FILE.removesuffix('.py')}.{architecture}"}
