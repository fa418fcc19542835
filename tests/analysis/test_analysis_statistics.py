"""Statistics against hand computation and scipy; published figures; effective lengths."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from analysis_rows import kernel
from scipy import stats

from megatron_patches.analysis.kernels import effective_length, reaches
from megatron_patches.analysis.published import query, read_published
from megatron_patches.analysis.rows import RowError
from megatron_patches.analysis.statistics import paired_test, summarize

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published.csv"


def test_summary_by_hand() -> None:
    # Deviations -3, -1, 1, 3 of the mean 5: 20 / (4 - 1).
    summary = summarize([2, 4, 6, 8])
    assert (summary.mean, summary.count) == (5.0, 4)
    assert summary.std == pytest.approx(math.sqrt(20 / 3), rel=1e-15)
    assert summarize([7.0]).std is None
    with pytest.raises(ValueError, match="no values"):
        summarize([])


def test_paired_test_by_hand() -> None:
    # Differences -1, -2, -3: mean -2, std 1, t = -2 sqrt(3). With 2 degrees of freedom the t
    # distribution has the closed form p = 1 - |t| / sqrt(2 + t^2).
    test = paired_test({1: 10.0, 2: 20.0, 3: 30.0}, {1: 11.0, 2: 22.0, 3: 33.0})
    t = 2 * math.sqrt(3)
    assert test.difference == pytest.approx(-2)
    assert test.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-12)
    # Quantile for 2 degrees of freedom at q = 0.975: (2q - 1) sqrt(2) / (2 sqrt(q(1 - q))).
    half = 0.95 * math.sqrt(2) / (2 * math.sqrt(0.975 * 0.025)) / math.sqrt(3)
    assert test.interval == pytest.approx((-2 - half, -2 + half), rel=1e-12)
    assert not test.first_lower and not test.second_lower  # p = 0.074


def test_paired_test_equals_scipy_in_both_directions() -> None:
    first = dict(enumerate([23.9, 23.1, 24.6, 23.5, 24.4]))
    second = dict(enumerate([24.1, 23.4, 24.9, 23.6, 24.7]))
    expected = stats.ttest_rel(list(first.values()), list(second.values()))
    interval = expected.confidence_interval(0.95)
    test = paired_test(first, second)
    assert test.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert test.interval == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert test.first_lower and not test.second_lower
    back = paired_test(second, first)
    assert back.second_lower and not back.first_lower
    # Unpaired, the spread over seeds would hide it.
    assert stats.ttest_ind(list(first.values()), list(second.values())).pvalue > 0.3
    strict = paired_test(first, second, alpha=0.001)
    assert not strict.first_lower and strict.interval[0] < test.interval[0]


def test_paired_test_of_students_sleep_data() -> None:
    """Student's own example (Biometrika 6, 1908, p. 20), as R's manual of t.test computes it."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    test = paired_test(dict(enumerate(first)), dict(enumerate(second)))
    assert test.difference == pytest.approx(-1.58, abs=1e-12)
    assert test.p_value == pytest.approx(0.002833, abs=5e-7)
    assert test.interval == pytest.approx((-2.4598858, -0.7001142), abs=5e-8)
    assert test.first_lower


def test_pairs_are_matched_by_seed() -> None:
    test = paired_test({3: 1.0, 1: 5.0, 9: 100.0}, {1: 5.5, 3: 1.25, 7: 0.0})
    assert test.count == 2
    assert test.difference == pytest.approx(-0.375)
    with pytest.raises(ValueError, match="no common seed"):
        paired_test({1: 1.0}, {2: 1.0})


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        ({1: 2.0}, {1: 3.0}, "one seed: no test"),
        ({1: 2.0, 2: 3.0}, {1: 2.0, 2: 3.0}, "no spread over seeds: no test"),
        ({1: 0.1, 2: 0.2, 3: 0.3}, {1: 1.1, 2: 1.2, 3: 1.3}, "no spread over seeds: no test"),
    ],
)
def test_no_test_is_said(first: dict[int, float], second: dict[int, float], note: str) -> None:
    test = paired_test(first, second)
    assert (test.p_value, test.interval, test.note) == (None, None, note)
    assert not test.first_lower and not test.second_lower


def test_published_figures() -> None:
    rows = read_published(PUBLISHED)
    assert len(rows) == 520
    assert sum(row.value is not None for row in rows) == 517
    assert {row.note for row in rows if row.value is None} == {"out of memory"}

    def value(dataset: str, method: str, length: int, table: str = "Table 3") -> tuple:
        (row,) = query(
            rows, paper="KERPLE", table=table, dataset=dataset, method=method, eval_length=length
        )
        return row.value, row.std, row.log_significantly_better

    assert value("openwebtext2", "kerple_log", 512) == (23.9, 0.6, False)
    assert value("openwebtext2", "kerple_log", 16384) == (21.4, 0.6, False)
    assert value("openwebtext2", "sinusoidal", 16384) == (30046.0, 4824.0, True)
    assert value("github", "kerple_log", 8192) == (2.71, 0.05, False)
    assert value("arxiv", "rpe", 16384) == (6.25, 0.61, True)
    assert len(query(rows, paper="KERPLE", table="Table 3")) == 108
    # Three kernels have other names in the file than in the suite.
    assert value("github", "kerple_weight1", 512, "Table 6") == (7.78, 0.48, False)
    assert value("github", "kerple_weight", 512, "Table 6") == (3.56, 0.23, False)
    assert value("arxiv", "kerple_power_weight", 8192, "Table 5") == (5.16, 0.18, False)
    assert {row.method for row in rows if "wht" in row.method} == set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("paper,", "paper;", 1), ":1: expected the columns"),
        (lambda text: text.replace(",23.9,", ",x,", 1), ":2: bad value"),
        (lambda text: text.replace("512,23.9,0.6,0,", "512,23.9,0.6,2,", 1), ":2: bad value"),
        (lambda text: text.replace(",23.9", "", 1), ":2: expected 12 columns"),
    ],
)
def test_bad_published_file_is_named(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "published.csv"
    path.write_text(change(PUBLISHED.read_text()))
    with pytest.raises(RowError, match=message):
        read_published(path)


def test_effective_length_of_alibi_is_pinned() -> None:
    # The 12-head recipe of ALiBi's code: the 8 slopes of 8 heads, then every other one of 16.
    slopes = [2.0 ** -(h + 1) for h in range(8)] + [2.0 ** -(h + 0.5) for h in range(4)]
    distances = list(range(1025))
    found = sorted(effective_length(distances, [-m * d for d in distances]) for m in slopes)
    assert found == [3, 5, 6, 9, 12, 17, 23, 33, 65, 129, 257, 513]
    crossings = sorted(2 / m for m in slopes)
    assert found == [math.floor(c) + 1 for c in crossings]


@pytest.mark.parametrize(("r1", "r2"), [(1.0, 1.0), (0.5, 0.3), (1.9, 0.01), (0.4, 0.9), (2, 2)])
def test_effective_length_equals_the_closed_forms(r1: float, r2: float) -> None:
    distances = list(range(5000))
    log = effective_length(distances, [-r1 * math.log1p(r2 * d) for d in distances])
    assert log == math.floor((math.exp(2 / r1) - 1) / r2) + 1
    exponent = max(r2, 0.3)
    power = effective_length(distances, [-r1 * d**exponent for d in distances])
    assert power == math.floor((2 / r1) ** (1 / exponent)) + 1


def test_effective_length_edges() -> None:
    assert effective_length([0, 1, 2], [0.0, -1.0, -2.0]) is None  # -2 is not below -2
    assert effective_length([0, 8, 64], [0.0, -1.0, -9.0], threshold=-0.5) == 8
    with pytest.raises(ValueError, match="3 distances but 2"):
        effective_length([0, 1, 2], [0.0, -1.0])
    with pytest.raises(ValueError, match="ascend"):
        effective_length([1, 0], [0.0, -1.0])
    rows = [kernel(0), kernel(1, bias=None, weight=[1.0] * 64), kernel(2)]
    assert reaches(rows) == {"kerple_log": {1: [13, 2]}}
