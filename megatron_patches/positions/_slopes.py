"""ALiBi's slopes, for any number of heads.

Press, Smith, Lewis: Train Short, Test Long (arXiv 2108.12409), section 3, and the authors' code for
head counts that are no power of two.
"""

from __future__ import annotations

CONVENTION = "authors"  # recorded in checkpoints; other libraries extend the series differently


def alibi_slopes(heads: int) -> list[float]:
    """One positive slope per head, in head order; not sorted.

    A power of two n: 2^(-8/n), 2^(-16/n), ..., 2^-8. Otherwise, n being the largest power of two
    below, the series of n and then the 1st, 3rd, 5th, ... value of the series of 2n.
    """
    whole = 1 << (heads.bit_length() - 1)
    series = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return series + extra
