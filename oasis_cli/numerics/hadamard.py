"""Orthogonal rotations that spread outliers: Hadamard matrices of the sizes that models have, and their fast product.

Sylvester's doubling gives powers of two. Paley's two constructions (J. Math. Phys. 12, 1933) give q + 1 for a prime
power q = 3 mod 4 and 2 (q + 1) for q = 1 mod 4. Kronecker products of both reach most widths: 576 = 36 * 16,
1536 = 12 * 128, 11008 = 344 * 32, 13824 = 108 * 128, 14336 = 28 * 512.
"""

import itertools
import math
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LARGEST_PALEY: Final = 1024
"""Beyond, the dense factor would cost more than the rotation is worth."""
_Signs = npt.NDArray[np.int8]


def hadamard_factors(size: int) -> tuple[int, int] | None:
    """Orders m and p, p a power of two, of matrices whose Kronecker product has order `size`; the smallest m.

    Returns:
        None where no such matrix is known here; for orders that are neither 1, 2 nor multiples of 4 there is none.
    """
    power = size & -size
    while power >= 1:
        odd = size // power
        if odd == 1 or (odd <= _LARGEST_PALEY and _paley_parameters(odd)):
            return odd, power
        power //= 2
    return None


@lru_cache(maxsize=16)
def hadamard_matrix(order: int) -> Tensor:
    """A Hadamard matrix H, H Hᵀ = order * I.

    Args:
        order: 1, a power of two, or one of Paley's.

    Returns:
        float32 [order, order] of +1 and -1.

    Raises:
        ValueError: no matrix of this order is known here.
    """
    if order < 1:
        raise ValueError(f"a Hadamard matrix has a positive order, got {order}")
    signs: _Signs
    if order & (order - 1) == 0:
        signs = np.ones((1, 1), dtype=np.int8)
        while len(signs) < order:
            signs = np.block([[signs, signs], [signs, -signs]])
    else:
        parameters = _paley_parameters(order)
        if parameters is None:
            raise ValueError(f"no Hadamard matrix of order {order} is known here")
        signs = _paley(*parameters)
    return torch.from_numpy(signs.astype(np.float32))


def rotate(x: Tensor) -> Tensor:
    """X R with R = H / sqrt(K), orthogonal; the inverse is the product with Rᵀ.

    Args:
        x: float [..., K].

    Returns:
        [..., K] in the dtype of x.

    Raises:
        ValueError: no Hadamard matrix of order K is known here.
    """
    K = x.shape[-1]
    factors = hadamard_factors(K)
    if factors is None:
        raise ValueError(f"no Hadamard matrix of order {K} is known here")
    m, p = factors
    left, right = (hadamard_matrix(order).to(x.device, x.dtype) for order in (m, p))
    blocks = x.reshape(*x.shape[:-1], m, p)
    # (H_m kron H_p) as two small products
    product: Tensor = (left.T @ blocks @ right) if m > 1 else blocks @ right
    return product.reshape(x.shape) / math.sqrt(K)


def _paley_parameters(order: int) -> tuple[int, int, bool] | None:
    """(p, n, doubled) of Paley's construction over GF(p^n) that gives this order."""
    for q, doubled in ((order - 1, False), (order // 2 - 1, True)):
        if (doubled and order % 2) or q < 3 or q % 4 != (1 if doubled else 3):
            continue
        if (power := _prime_power(q)) is not None:
            return (*power, doubled)
    return None


def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, n) with p^n = q, p a prime."""
    p = next((d for d in range(2, int(q**0.5) + 1) if q % d == 0), q)
    n = 0
    while q % p == 0:
        q, n = q // p, n + 1
    return (p, n) if q == 1 else None


def _paley(p: int, n: int, doubled: bool) -> _Signs:
    """Paley's matrix from the quadratic character of GF(p^n)."""
    elements = list(itertools.product(range(p), repeat=n))
    modulus = _irreducible(p, n)
    squares = {_multiply(element, element, modulus, p) for element in elements} - {(0,) * n}

    def character(element: tuple[int, ...]) -> int:
        return 0 if not any(element) else (1 if element in squares else -1)

    table = {element: character(element) for element in elements}
    jacobsthal = np.array(
        [[table[tuple((a - b) % p for a, b in zip(x, y, strict=True))] for y in elements] for x in elements]
    )
    q = len(elements)
    bordered = np.zeros((q + 1, q + 1), dtype=np.int8)
    bordered[0, 1:], bordered[1:, 0], bordered[1:, 1:] = 1, (1 if doubled else -1), jacobsthal
    unit = np.eye(q + 1, dtype=np.int8)
    if doubled:
        return np.kron(bordered, np.array([[1, 1], [1, -1]])) + np.kron(unit, np.array([[1, -1], [-1, -1]]))
    return bordered + unit


def _multiply(a: tuple[int, ...], b: tuple[int, ...], modulus: tuple[int, ...], p: int) -> tuple[int, ...]:
    """Product in GF(p)[x] / modulus; coefficients from the constant up, the modulus monic and without its lead."""
    n = len(a)
    product = [0] * (2 * n - 1)
    for i, j in itertools.product(range(n), repeat=2):
        product[i + j] = (product[i + j] + a[i] * b[j]) % p
    for degree in range(2 * n - 2, n - 1, -1):
        lead, product[degree] = product[degree], 0
        for i, coefficient in enumerate(modulus):
            product[degree - n + i] = (product[degree - n + i] - lead * coefficient) % p
    return tuple(product[:n])


def _irreducible(p: int, n: int) -> tuple[int, ...]:
    """A polynomial by which GF(p)[x] is a field: the first without a zero divisor among products of lower degrees."""
    if n == 1:
        return (0,)
    reducible = set()
    for low in range(1, n // 2 + 1):
        for a, b in itertools.product(
            itertools.product(range(p), repeat=low), itertools.product(range(p), repeat=n - low)
        ):
            product = np.polynomial.polynomial.polymul((*a, 1), (*b, 1)).round().astype(int) % p
            reducible.add(tuple(int(c) for c in product[:n]))
    return next(c for c in itertools.product(range(p), repeat=n) if c not in reducible)
