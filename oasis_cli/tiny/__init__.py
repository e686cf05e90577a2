"""A toy LLaMA with its tokenizer, shipped so that the whole chain runs without network; README.md says what it is."""

from pathlib import Path


def tiny_model_folder() -> Path:
    """The Hugging Face folder of the shipped toy model (LLaMA, float32, about 0.9 million parameters)."""
    return Path(__file__).parent
