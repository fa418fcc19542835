"""Holm's correction, the bootstrap over blocks of text, and errors from blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from megatron_patches.analysis.statistics import (
    RESAMPLES,
    block_means,
    bootstrap_interval,
    clearly_positive,
    holm,
    text_error,
)


def test_holm_by_hand() -> None:
    # Sorted 0.005 * 4, 0.01 * 3, 0.03 * 2, 0.04 * 1; the last may not fall below 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2] and holm([]) == []
    assert holm([0.02, 0.02, 0.02]) == pytest.approx([0.06] * 3)


def test_holm_lies_between_no_correction_and_bonferroni() -> None:
    values = list(np.random.default_rng(0).uniform(0, 0.2, 20))
    corrected = holm(values)
    order = np.argsort(values)
    assert all(a <= b for a, b in pairwise(np.asarray(corrected)[order]))
    assert all(p <= c <= min(1, 20 * p) for p, c in zip(values, corrected, strict=True))
    # Benjamini and Hochberg's control of the weaker rate, from scipy, never exceeds it.
    assert np.all(stats.false_discovery_control(values) <= np.asarray(corrected) + 1e-15)


def test_bootstrap_is_scipys_paired_one() -> None:
    draw = np.random.default_rng(3)
    first = draw.gamma(2.0, 1.0, 40)
    second = first + draw.normal(0.1, 0.2, 40)
    expected = stats.bootstrap(
        (first, second),
        lambda a, b, axis: np.mean(a, axis=axis) - np.mean(b, axis=axis),
        paired=True,
        n_resamples=RESAMPLES,
        vectorized=True,
        random_state=np.random.default_rng(0),
    ).confidence_interval
    found = bootstrap_interval(list(first), list(second))
    assert found == pytest.approx((expected.low, expected.high), rel=1e-9)
    # Unpaired, the spread that both share would drown the difference.
    assert found[1] < 0
    apart = stats.bootstrap(
        (first, second),
        lambda a, b, axis: a.mean(axis) - b.mean(axis),
        vectorized=True,
        random_state=np.random.default_rng(0),
    )
    assert apart.confidence_interval.high > 0
    assert bootstrap_interval(list(first), list(second)) == found
    narrow = bootstrap_interval(list(first), list(second), alpha=0.5)
    assert found[0] < narrow[0] < narrow[1] < found[1]


def test_bootstrap_edges() -> None:
    # Means of two draws from {0, 1} are 0, 1/2, 1 with chances 1/4, 1/2, 1/4.
    assert bootstrap_interval([1.0, 2.0], [1.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_interval([1.0], [2.0]) is None
    assert bootstrap_interval([1.1, 2.1, 3.1], [1.0, 2.0, 3.0]) is None  # rounding errors only
    with pytest.raises(ValueError, match="3 windows and 2: not the same text"):
        bootstrap_interval([1, 2, 3], [1, 2])


def test_bootstrap_of_many_normal_differences_is_the_t_interval() -> None:
    differences = np.random.default_rng(5).normal(0.3, 1.0, 400)
    low, high = bootstrap_interval(list(differences), [0.0] * 400)
    exact = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((exact.low, exact.high), abs=0.01)


def test_bootstrap_of_blocks_resamples_their_means() -> None:
    """Blocks of one size: scipy's BCa of the means of the blocks, whose mean is the mean."""
    draw = np.random.default_rng(7)
    values = np.repeat(draw.normal(0.2, 1.0, 12), 4) + draw.normal(0, 0.1, 48)
    expected = stats.bootstrap(
        (values.reshape(12, 4).mean(axis=1),),
        np.mean,
        n_resamples=RESAMPLES,
        random_state=np.random.default_rng(0),
    ).confidence_interval
    found = bootstrap_interval(list(values), [0.0] * 48, block=4)
    assert found == pytest.approx((expected.low, expected.high), rel=1e-9)
    # Four neighbours that agree are one piece of evidence: single windows would halve the interval.
    single = bootstrap_interval(list(values), [0.0] * 48)
    assert found[1] - found[0] > 1.5 * (single[1] - single[0])
    assert bootstrap_interval(list(values), [0.0] * 48, block=25) is None  # one block


def test_blocks_by_hand() -> None:
    assert block_means([1, 2, 3, 4, 5, 6], 2) == ([1.5, 3.5, 5.5], [2, 2, 2])
    assert block_means([1, 2, 3, 4, 5], 2) == ([1.5, 4.0], [2, 3])  # each of two at least
    assert block_means([1, 2], 5) == ([1.5], [2])
    for bad in ([], 1), ([1.0], 0):
        with pytest.raises(ValueError, match="nothing to average"):
            block_means(*bad)


def test_text_error_by_hand() -> None:
    # One window a block: the standard error of the mean.
    assert text_error([1.0, 2.0, 4.0]) == pytest.approx(stats.sem([1.0, 2.0, 4.0]), rel=1e-12)
    assert text_error([1.0, 2.0, 4.0, 9.0], 2) == pytest.approx(stats.sem([1.5, 6.5]), rel=1e-12)
    assert text_error([1.0, 2.0], 2) is None
    # Unequal blocks (two windows of mean 1.5, three of mean 4; mean 3): the linearised ratio,
    # sqrt(2 * ((2 * 1.5)^2 + (3 * 1)^2)) / 5 = 6 / 5.
    assert text_error([1, 2, 3, 4, 5], 2) == pytest.approx(6 / 5)


def test_text_error_sees_what_neighbours_share() -> None:
    """An autoregressive text: the error from blocks is that of its mean over other such texts."""
    draw = np.random.default_rng(2)
    noise = draw.normal(0, 1, (400, 1024))
    texts = np.zeros_like(noise)
    for step in range(1, 1024):
        texts[:, step] = 0.8 * texts[:, step - 1] + noise[:, step]
    true = texts.mean(axis=1).std(ddof=1)
    blocks = np.mean([text_error(text.tolist(), 64) for text in texts])
    single = np.mean([text_error(text.tolist()) for text in texts])
    assert blocks == pytest.approx(true, rel=0.1) and single < 0.4 * true


def test_clearly_positive_is_the_t_interval() -> None:
    draw = np.random.default_rng(4)
    for shift in (0.0, 0.5, 1.0, 2.0):
        sample = draw.normal(shift, 1.0, 6)
        low = stats.ttest_1samp(sample, 0.0).confidence_interval(0.95).low
        assert clearly_positive(list(sample)) is bool(low > 0)
    assert clearly_positive([0.1, 0.1]) and not clearly_positive([0.0, 0.0])
    with pytest.raises(ValueError, match="one value"):
        clearly_positive([1.0])
