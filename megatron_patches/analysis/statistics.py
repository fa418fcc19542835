"""Mean and spread over seeds, and the paired test between two methods. scipy loads on first use.

Seeds fix the order of the training text (and the initial weights), so two methods are compared
pair by pair: the spread that they share drops out. KERPLE (arXiv 2205.09921, section 5) uses the
paired two-sided t-test at 0.05 and marks one direction only; here both directions count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ALPHA = 0.05


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (n - 1) of ``count`` values; ``std`` is None at n = 1."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class PairedTest:
    """Mean of ``first - second`` over ``count`` common seeds, in the unit of the values.

    ``interval`` is the two-sided 1 - ``alpha`` confidence interval of that mean. Where no test is
    possible, ``interval`` and ``p_value`` are None and ``note`` says why.
    """

    difference: float
    count: int
    interval: tuple[float, float] | None
    p_value: float | None
    alpha: float
    note: str | None = None

    @property
    def first_lower(self) -> bool:
        """Whether the first is significantly lower than the second."""
        return self._significant and self.difference < 0

    @property
    def second_lower(self) -> bool:
        """Whether the second is significantly lower than the first."""
        return self._significant and self.difference > 0

    @property
    def _significant(self) -> bool:
        return self.p_value is not None and self.p_value < self.alpha


def summarize(values: Iterable[float]) -> Summary:
    """Mean and spread of at least one value; ValueError for none."""
    data = [float(value) for value in values]
    if not data:
        raise ValueError("no values: nothing to summarise")
    mean = math.fsum(data) / len(data)
    if len(data) == 1:
        return Summary(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in data) / (len(data) - 1)
    return Summary(mean, math.sqrt(variance), len(data))


def paired_test(
    first: Mapping[int, float], second: Mapping[int, float], *, alpha: float = ALPHA
) -> PairedTest:
    """Paired two-sided t-test of two methods' values by seed, over the seeds that both have.

    ValueError when they have no seed in common. With one common seed, or differences that are the
    same for every seed, there is no spread to test against: the result says so.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise ValueError(f"no common seed: {sorted(first)} and {sorted(second)}")
    differences = summarize(first[seed] - second[seed] for seed in seeds)
    mean, spread, count = differences.mean, differences.std, differences.count
    if spread is None:
        return PairedTest(mean, count, None, None, alpha, "one seed: no test")
    # Below this the differences are rounding errors of the values, and so would be a p-value.
    if spread <= 1e-12 * max(abs(values[seed]) for values in (first, second) for seed in seeds):
        return PairedTest(mean, count, None, None, alpha, "no spread over seeds: no test")

    from scipy import stats

    error, freedom = spread / math.sqrt(count), count - 1
    p_value = 2 * float(stats.t.sf(abs(mean) / error, freedom))
    half = error * float(stats.t.ppf(1 - alpha / 2, freedom))
    return PairedTest(mean, count, (mean - half, mean + half), p_value, alpha)
