"""Mean and spread, paired comparison of two methods over seeds and over windows. scipy loads late.

Seeds fix the order of the training text (and the initial weights), so two methods are compared
pair by pair: the spread that they share drops out. KERPLE (arXiv 2205.09921, section 5) uses the
paired two-sided t-test at 0.05 and marks one direction only; here both directions count.

Two samples lie behind a difference: the trained seeds and the windows of text. The t-test asks what
other seeds would give on this text, the bootstrap what other text would give with these weights.
Windows that follow one another in a text are no independent draws, so text is sampled in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

ALPHA = 0.05
RESAMPLES = 9999  # scipy's default
# Numbers held at once by a bootstrap: 32 MiB, however many windows there are.
BATCH_NUMBERS = 2**22


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
    # A p-value of rounding errors would be one itself.
    if _no_spread(differences, (values[seed] for values in (first, second) for seed in seeds)):
        return PairedTest(mean, count, None, None, alpha, "no spread over seeds: no test")

    from scipy import stats

    error, freedom = spread / math.sqrt(count), count - 1
    p_value = 2 * float(stats.t.sf(abs(mean) / error, freedom))
    half = error * float(stats.t.ppf(1 - alpha / 2, freedom))
    return PairedTest(mean, count, (mean - half, mean + half), p_value, alpha)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number after Holm (1979), in the order given.

    The k-th smallest of n is multiplied by n - k + 1, never falls below the one before it, and is
    at most 1: rejecting those below alpha keeps the chance of any false rejection below alpha.
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = highest
    return corrected


def block_means(values: Sequence[float], block: int = 1) -> tuple[list[float], list[int]]:
    """Means of runs of at least ``block`` consecutive values each, and how many values each holds.

    There are ``len(values) // block`` of them, one at least; where that does not divide the values,
    some hold more than others. ValueError without values or for a block below 1.
    """
    if not values or block < 1:
        raise ValueError(f"{len(values)} values in blocks of {block}: nothing to average")
    count = max(1, len(values) // block)
    ends = [len(values) * number // count for number in range(count + 1)]
    sizes = [end - start for start, end in pairwise(ends)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    return means, sizes


def bootstrap_interval(
    first: Sequence[float], second: Sequence[float], *, block: int = 1, alpha: float = ALPHA
) -> tuple[float, float] | None:
    """Interval (BCa, 1 - ``alpha``) of the mean of ``first - second`` over other samples of text.

    The two hold the losses of the same windows in the order of the text and are resampled together,
    ``block`` consecutive windows at a time (see ``block_means``): neighbours resemble each other, and
    single windows would count them as independent. The draws start from a fixed state, so the same
    data gives the same interval. None where a sample says nothing: fewer than two blocks, or
    differences that are all the same. ValueError when the two differ in number.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} windows and {len(second)}: not the same text")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    means, sizes = block_means(differences, block)
    if len(means) < 2 or _no_spread(summarize(means), (*first, *second)):
        return None

    import numpy as np
    from scipy import stats

    sums, counts = np.asarray(means) * sizes, np.asarray(sizes, dtype=np.float64)
    interval = stats.bootstrap(
        (sums, counts),
        lambda total, count, axis: total.sum(axis=axis) / count.sum(axis=axis),
        paired=True,
        vectorized=True,
        confidence_level=1 - alpha,
        n_resamples=RESAMPLES,
        method="BCa",
        batch=max(1, BATCH_NUMBERS // len(means)),
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def text_error(values: Sequence[float], block: int = 1) -> float | None:
    """Standard error of the mean of ``values`` over other samples of as much text.

    From the spread of the means of blocks (see ``block_means``), each weighed by its size; None with
    fewer than two blocks.
    """
    means, sizes = block_means(values, block)
    count, total = len(means), sum(sizes)
    if count < 2:
        return None
    mean = math.fsum(m * n for m, n in zip(means, sizes, strict=True)) / total
    squares = math.fsum((n * (m - mean)) ** 2 for m, n in zip(means, sizes, strict=True))
    return math.sqrt(squares * count / (count - 1)) / total


def clearly_positive(values: Sequence[float], *, alpha: float = ALPHA) -> bool:
    """Whether the t-interval (1 - ``alpha``) of the mean of two values or more lies above 0."""
    found = summarize(values)
    if found.std is None:
        raise ValueError("one value has no interval")

    from scipy import stats

    half = float(stats.t.ppf(1 - alpha / 2, found.count - 1)) * found.std / math.sqrt(found.count)
    return found.mean > half


def _no_spread(summary: Summary, values: Iterable[float]) -> bool:
    """Whether the spread of differences is no more than the rounding errors of ``values``."""
    return summary.std is None or summary.std <= 1e-12 * max(abs(value) for value in values)
