"""How many outliers a token has; needs no tensor library, since timing by shape alone asks too."""

from decimal import ROUND_CEILING, Decimal


def outlier_count(K: int, fraction: float) -> int:
    """Outliers a side of a token of K values: ceil(fraction * K), at most K/2.

    The product is taken in decimal: 0.07 * 100 is 7 there, and 7.000000000000001 in binary.

    Raises:
        ValueError: the fraction is negative or above one half.
    """
    if not 0 <= fraction <= 0.5:
        raise ValueError(f"outlier fraction a side must lie in [0, 0.5], got {fraction}")
    exact = (Decimal(repr(float(fraction))) * K).to_integral_value(rounding=ROUND_CEILING)
    return min(int(exact), K // 2)
