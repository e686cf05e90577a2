"""Indices chosen one input channel after the other, each error passed on to the channels that are still to come.

GPTQ's loop (Frantar et al. 2023) with nearest centroids of a fixed codebook in the place of rounding. What falls is the
error of the layer's output on the calibration tokens, tr((W - Ŵ) H (W - Ŵ)ᵀ) with H = sum of x xᵀ; scales and codebook
stay as they are, so the format does not change. Channels are visited by falling H[k, k]: the order of the work alone,
nothing of it is stored.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from oasis_cli.numerics.codebook import Codebook, boundaries

_CHUNK: Final = 128


def damped(hessian: Tensor, damping: float) -> Tensor:
    """H with a share of its mean diagonal added to the diagonal, so that it can be inverted whatever it is.

    Args:
        hessian: sum of x xᵀ, symmetric, [K, K].
        damping: the share, positive.

    Returns:
        float64 [K, K], positive definite; the unit matrix where H is zero, since then nothing is known.
    """
    wide = hessian.double()
    level = float(wide.diagonal().mean())
    if level <= 0:
        return torch.eye(len(wide), dtype=torch.float64, device=wide.device)
    return wide + damping * level * torch.eye(len(wide), dtype=torch.float64, device=wide.device)


def inverse_factor(hessian: Tensor) -> Tensor:
    """Upper triangular U with Uᵀ U = H⁻¹; row k says how an error of channel k is passed on to later ones.

    Args:
        hessian: positive definite, float64 [K, K].

    Returns:
        float64 [K, K].
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


class ErrorFeedback:
    """The loop for one H, which several matrices and several codebooks may share.

    Args:
        hessian: positive definite, float64 [K, K], as `damped` gives it.
    """

    def __init__(self, hessian: Tensor) -> None:
        # stable, so that ties are broken alike everywhere
        self._order = hessian.diagonal().argsort(descending=True, stable=True)
        self._factor = inverse_factor(hessian[self._order][:, self._order]).float()

    def run(self, weight: Tensor, quantize: Callable[[int, Tensor], Tensor]) -> None:
        """Visit every input channel once.

        Args:
            weight: W, float [N, K]; it is left as it is.
            quantize: given k and the channel as earlier errors have left it, float32 [N], gives what it becomes.
        """
        factor, order = self._factor, self._order.tolist()
        rest = weight.float().T[self._order].contiguous()  # [K, N]: an input channel is a row
        for start in range(0, len(rest), _CHUNK):
            stop = min(start + _CHUNK, len(rest))
            errors = torch.empty_like(rest[start:stop])
            for k in range(start, stop):
                errors[k - start] = (rest[k] - quantize(order[k], rest[k])) / factor[k, k]
                # the rest of this chunk at once, everything beyond when the chunk is done
                rest[k + 1 : stop].addr_(factor[k, k + 1 : stop], errors[k - start], alpha=-1)
            rest[stop:] -= factor[start:stop, stop:].T @ errors

    def assign(self, weight: Tensor, scale: Tensor, codebook: Codebook) -> Tensor:
        """Indices of a matrix under fixed scales and a fixed codebook.

        Args:
            weight: W, float [N, K].
            scale: s_n, float16 [N]; a channel of scale 0 stays zero whatever its indices.
            codebook: C_W.

        Returns:
            uint8 [N, K].
        """
        wide = scale.float().to(weight.device)
        centroids = codebook.centroids.float().to(weight.device)
        limits = boundaries(codebook.centroids).to(weight.device)[:, None] * wide  # [C - 1, N]
        index = torch.empty(weight.T.shape, dtype=torch.uint8, device=weight.device)

        def nearest(k: int, channel: Tensor) -> Tensor:
            index[k] = (limits <= channel).sum(dim=0)
            return wide * centroids[index[k].int()]

        self.run(weight, nearest)
        return index.T.contiguous()
