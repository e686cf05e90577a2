"""Codebooks for the cache of keys and values: one a layer, on numbers scaled by token and head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oasis_cli.formats.quantized import QuantizationSpec, is_cached
from oasis_cli.numerics.codebook import Codebook
from oasis_cli.numerics.histogram import Histogram
from oasis_cli.numerics.kmeans import cluster
from oasis_cli.numerics.scale import token_scale
from oasis_cli.progress import Progress
from oasis_cli.quantization.kmeans_weights import no_centroids

_SEQUENCES = 2
"""One holds thousands of tokens of every head already."""


def cache_codebooks(
    model: PreTrainedModel, tokens: Tensor, spec: QuantizationSpec, seed: int, progress: Progress
) -> Mapping[str, Codebook]:
    """K-Means of x / s of every key and value, s a token's and head's scale, each weighing s², its squared error.

    Args:
        model: the original; it is left as it is.
        tokens: calibration sequences, int64 [samples, seqlen]; the first few serve.
        spec: of the folder.
        seed: of faiss's initial draw.
        progress: who is told.

    Returns:
        float16 codebooks by layer; none where the cache is left as it is.
    """
    cache = spec.cache
    if cache is None:
        return {}
    found = {name: Histogram.empty() for name in spec.layers if is_cached(name)}

    def watch(name: str) -> Any:
        def add(_: nn.Module, __: Any, output: Tensor) -> None:
            heads = output.reshape(-1, cache.head_dim).float()
            scale = token_scale(heads, spec.scale_kind, 0)[:, None]
            alive = scale.flatten() > 0
            found[name].add((heads / scale)[alive], scale.square().expand_as(heads)[alive])

        return model.get_submodule(name).register_forward_hook(add)

    hooks = [watch(name) for name in found]
    with torch.no_grad(), progress.task("keys and values", min(len(tokens), _SEQUENCES), "sequences") as task:
        for sequence in tokens[:_SEQUENCES]:
            model(input_ids=sequence[None].to(model.device), use_cache=False, logits_to_keep=1)
            task.advance()
    for hook in hooks:
        hook.remove()
    return {name: _codebook(histogram, 2**cache.bits, seed) for name, histogram in found.items()}


def _codebook(histogram: Histogram, size: int, seed: int) -> Codebook:
    points = histogram.points()
    if not len(points.values):
        return no_centroids(size, "fp16")
    return Codebook(torch.from_numpy(cluster(points, (size,), seed)[size].centroids).half())
