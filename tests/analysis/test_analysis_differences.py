"""Differences from a reference: Holm, bootstrap, spreads, and the table that shows them."""

from __future__ import annotations

import csv
import io
import math
from itertools import pairwise

import numpy as np
import pytest
from analysis_rows import fields, study
from scipy import stats

from megatron_patches.analysis.differences import differences, differences_table
from megatron_patches.analysis.render import to_csv, to_latex, to_markdown
from megatron_patches.analysis.rows import Row, RowError
from megatron_patches.analysis.statistics import (
    RESAMPLES,
    bootstrap_interval,
    holm,
    paired_test,
    spreads,
)


def windows(method: str, seed: int, losses: list[float], **changes: object) -> Row:
    """A cell of windows of 1024 tokens with these losses."""
    loss = math.fsum(losses) / len(losses)
    scores = {"loss": loss, "perplexity": math.exp(loss), "window_losses": losses}
    sizes = {"windows": len(losses), "tokens": 1024 * len(losses)}
    name = {"method": method, "seed": seed, "config_sha": f"{method}{seed}"}
    return Row(**fields(**{**name, **scores, **sizes, **changes}))


def three_seeds() -> list[Row]:
    """Differences of loss 0.1, 0.2, 0.3 over seeds; two windows that differ by 0.04 each."""
    rows = []
    for seed, step in ((1, 0.1), (2, 0.2), (3, 0.3)):
        base = 2.0 + 0.5 * seed
        rows.append(windows("kerple_log", seed, [base, base + 1.0]))
        rows.append(windows("alibi", seed, [base + step - 0.02, base + 1.0 + step + 0.02]))
    return rows


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


def test_spreads_by_hand() -> None:
    # Seeds' means 2 and 5 (variance 4.5), windows' means 2, 3, 5.5 (variance 3.25); what is left
    # has the sum of squares 3 with 2 degrees of freedom: 4.5 - 1.5 / 3 = 4 for the seeds.
    both = spreads([[1, 2, 3], [3, 4, 8]])
    assert both.seeds == pytest.approx(2)
    assert both.windows == pytest.approx(math.sqrt(3.25 / 3))
    one = spreads([[1, 2, 3]])
    assert (one.seeds, one.windows) == (None, pytest.approx(stats.sem([1, 2, 3])))
    assert spreads([[1.0], [3.0]]).seeds == pytest.approx(math.sqrt(2))
    assert spreads([[1.0], [3.0]]).windows is None
    assert spreads([[0.0, 1.0], [1.0, 0.0]]).seeds == 0.0  # all of it noise
    for bad in ([], [[]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError, match="same windows"):
            spreads(bad)


def test_spreads_find_what_was_put_in() -> None:
    draw = np.random.default_rng(1)
    seeds, text = draw.normal(0, 0.5, (400, 1)), draw.normal(0, 2.0, (1, 400))
    both = spreads((seeds + text + draw.normal(0, 3.0, (400, 400))).tolist())
    assert both.seeds == pytest.approx(0.5, rel=0.1)
    assert both.windows == pytest.approx(2.0 / 20, rel=0.1)


def test_differences_by_hand() -> None:
    (found,) = differences(three_seeds())
    expected = paired_test({1: 0.1, 2: 0.2, 3: 0.3}, {1: 0.0, 2: 0.0, 3: 0.0})
    assert (found.label, found.length, found.seed) == ("alibi", 1024, 1)
    assert found.test.difference == pytest.approx(0.2)
    assert found.test.interval == pytest.approx(expected.interval)
    assert found.test.p_value == pytest.approx(expected.p_value)
    assert found.bootstrap == pytest.approx((0.08, 0.12))
    assert found.spreads.seeds == pytest.approx(0.1)
    assert found.spreads.windows == pytest.approx(0.02)
    (back,) = differences(three_seeds(), "alibi")
    assert back.label == "kerple_log" and back.test.difference == pytest.approx(-0.2)


def test_table_shows_and_marks_them() -> None:
    table = differences_table(three_seeds())
    ((label, cells),) = table.rows
    # t = 2 sqrt(3), 2 degrees of freedom: p = 0.0742; its quantile 4.3027 / sqrt(3) is 2.484.
    assert label == "alibi, 1024"
    assert [cell.text for cell in cells] == [
        *("+0.2000", "1.2214", "-0.0484 to +0.4484", "0.0742", "0.0742"),
        *("+0.0800 to +0.1200", "0.1000", "0.0200"),
    ]
    assert not any(cell.marks for cell in cells)
    text = to_markdown(table)
    assert "corrected over this table, tests: 1" in text and "windows of seed 1" in text


def test_holm_counts_the_tests_of_the_table() -> None:
    table = differences_table(study())
    rows = dict(table.rows)
    found = {d.label + f", {d.length}": d for d in differences(study())}
    assert list(rows) == list(found)
    expected = holm([d.test.p_value for d in found.values()])
    for (name, cells), p_value in zip(rows.items(), expected, strict=True):
        assert cells[3].mean == found[name].test.p_value
        assert cells[4].mean == p_value
        assert cells[3].marks == (("†",) if cells[3].mean < 0.05 else ())
        assert cells[4].marks == (("†",) if cells[4].mean < 0.05 else ())
    assert "learned, 1024" not in rows  # refused there
    assert any("† kerple_log is significantly better" in note for note in table.notes)
    better = differences_table(study(), reference="learned")
    assert any(note.startswith("‡ significantly better than learned") for note in better.notes)


def test_one_seed_leaves_the_bootstrap() -> None:
    table = differences_table([row for row in three_seeds() if row.seed == 2])
    ((_, cells),) = table.rows
    assert [cell.text for cell in cells[2:5]] == ["–", "–", "–"]
    assert cells[2].marks == ("[1]",) and "[1] one seed: no test" in table.notes
    assert cells[5].interval == pytest.approx((0.18, 0.22))
    assert table.notes[0] == (
        "no test over seeds is possible here, only the bootstrap over windows"
    )


def test_what_cannot_be_compared_is_said() -> None:
    with pytest.raises(RowError, match="no rows of none to compare with; --reference can be alibi"):
        differences_table(study(), reference="none")
    alone = differences_table([row for row in study() if row.method == "kerple_log"])
    assert alone.rows == () and alone.notes[0].startswith("nothing to compare")
    # A sliding evaluation scores more tokens of the first window, so its windows count unequally.
    uneven = {"protocol": "sliding", "stride": 512, "tokens": 1500}
    rows = [
        windows(method, 1, [2.0, 3.0], loss=loss, perplexity=math.exp(loss), **uneven)
        for method, loss in (("kerple_log", 2.3), ("alibi", 2.4))
    ]
    table = differences_table(rows)
    assert table.rows[0][1][5].text == "–"
    assert any("windows of unequal size" in note for note in table.notes)


def test_other_formats() -> None:
    table = differences_table(three_seeds())
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    by_column = {line["column"]: line for line in lines}
    assert float(by_column["95% over windows, low"]["mean"]) == pytest.approx(0.08, rel=1e-12)
    assert float(by_column["95% over windows, high"]["mean"]) == pytest.approx(0.12, rel=1e-12)
    assert by_column["Δ loss"]["seeds"] == "3"
    latex = to_latex(table)
    assert r"$\Delta$ loss" in latex and r"95\% over seeds" in latex and "Δ" not in latex
