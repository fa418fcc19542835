"""Differences from a reference, and the table that shows them."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from pathlib import Path

import numpy as np
import pytest
from analysis_rows import fields, make, study
from scipy import stats

from megatron_patches.analysis.differences import differences
from megatron_patches.analysis.differences_table import differences_table
from megatron_patches.analysis.render import to_csv, to_latex, to_markdown
from megatron_patches.analysis.rows import Row, RowError, latest_rows, read_rows
from megatron_patches.analysis.statistics import (
    RESAMPLES,
    bootstrap_interval,
    holm,
    paired_test,
)

ROOT = Path(__file__).resolve().parents[2]


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


def test_differences_by_hand() -> None:
    (found,) = differences(three_seeds())
    expected = paired_test({1: 0.1, 2: 0.2, 3: 0.3}, {1: 0.0, 2: 0.0, 3: 0.0})
    assert (found.label, found.length, found.seeds, found.blocks) == ("alibi", 1024, (1, 2, 3), 2)
    assert found.test.difference == pytest.approx(0.2)
    assert found.test.interval == pytest.approx(expected.interval)
    assert found.test.p_value == pytest.approx(expected.p_value)
    # The windows' means over seeds are 0.18 and 0.22.
    assert found.interval == pytest.approx((0.18, 0.22))
    assert found.spread == pytest.approx(0.1) and found.text == pytest.approx(0.02)
    (back,) = differences(three_seeds(), "alibi")
    assert back.label == "kerple_log" and back.test.difference == pytest.approx(-0.2)


def test_the_interval_over_text_is_of_the_mean_that_it_stands_beside() -> None:
    """Seed 1 alone would say the opposite of the mean over the three seeds."""
    draw = np.random.default_rng(0)
    rows, moved = [], []
    for seed, step in ((1, -0.02), (2, 0.06), (3, 0.05)):
        base = 2 + draw.normal(0, 0.1, 40)
        apart = step + draw.normal(0, 0.005, 40)
        moved.append(apart)
        rows.append(windows("kerple_log", seed, list(base)))
        rows.append(windows("alibi", seed, list(base + apart)))
    (found,) = differences(rows)
    low, high = found.interval
    assert 0 < low < found.test.difference < high
    mean = np.mean(moved, axis=0)
    exact = stats.bootstrap(
        (mean,), np.mean, n_resamples=RESAMPLES, random_state=np.random.default_rng(0)
    ).confidence_interval
    assert (low, high) == pytest.approx((exact.low, exact.high), rel=1e-6)
    assert found.text == pytest.approx(stats.sem(mean), rel=1e-9)
    assert found.spread == pytest.approx(np.std([m.mean() for m in moved], ddof=1), rel=1e-9)


def test_committed_rows_by_hand() -> None:
    """results/demo_seeds: windows of three lengths in blocks of 16384 tokens, worked out with numpy."""
    rows = latest_rows(read_rows(ROOT / "results" / "demo_seeds" / "rows.jsonl"))
    scored = {(row.method, row.eval_length, row.seed): row for row in rows}
    found = {(d.label, d.length): d for d in differences(rows)}
    for length in (512, 4096, 16384):
        losses = [
            np.mean([scored[m, length, seed].window_losses for seed in (1234, 1235, 1236)], axis=0)
            for m in ("alibi", "kerple_log")
        ]
        blocks = (losses[0] - losses[1]).reshape(8, 16384 // length).mean(axis=1)
        item = found["alibi", length]
        assert item.blocks == 8 and item.text == pytest.approx(stats.sem(blocks), rel=1e-9)
        assert item.test.difference == pytest.approx(blocks.mean(), abs=1e-6)
        exact = stats.bootstrap(
            (blocks,), np.mean, n_resamples=RESAMPLES, random_state=np.random.default_rng(0)
        ).confidence_interval
        assert item.interval == pytest.approx((exact.low, exact.high), rel=1e-6)
    low, high = found["alibi", 512].interval
    assert 0 < low < 0.0317 < high


def test_the_note_on_few_blocks_is_measured() -> None:
    """How often an interval over 8 (and 2) blocks of normal differences holds their true mean, 0."""
    shares = {}
    for count in (2, 8):
        draw = np.random.default_rng(count)
        samples = draw.normal(size=(150, count))
        ends = [bootstrap_interval(list(sample), [0.0] * count) for sample in samples]
        shares[count] = np.mean([low < 0 < high for low, high in ends])
    assert shares[8] == pytest.approx(0.87, abs=0.06) and shares[2] == pytest.approx(0.5, abs=0.1)
    table = differences_table(three_seeds())
    assert any("of 8 87%, of 4 80%, of 2 50%" in note for note in table.notes)


def test_windows_drawn_by_the_seed_keep_one_seed() -> None:
    """Protocol paper: windows pair within a seed only, so the cell says whose they are."""
    drawn = {"protocol": "paper"}
    rows = [dataclasses.replace(row, **drawn) for row in three_seeds()]
    table = differences_table(rows)
    ((_, cells),) = table.rows
    assert cells[6].interval == pytest.approx((0.08, 0.12))
    assert "of the windows of seed 1 alone, where Δ loss is +0.1000" in " ".join(table.notes)
    assert cells[6].marks and cells[7].marks and cells[8].text == "–"
    assert any("of one seed, from 2 windows, which were drawn one by one" in n for n in table.notes)
    longer = {"eval_length": 2048, "stride": 2048, "tokens": 4096}
    more = [*rows, *(dataclasses.replace(row, **longer) for row in rows)]
    assert [d.blocks for d in differences(more)] == [2, 2]


PASSES = "the split fills fewer than 320 windows: 4 shuffled passes over it"


@pytest.mark.parametrize("noted", [0, 1, 5])
def test_windows_that_share_text_have_no_statistics_over_text(noted: int) -> None:
    """Ten passes over a text would look like ten texts: whichever row says so, there is no interval."""
    rows = [dataclasses.replace(row, protocol="paper") for row in three_seeds()]
    rows[noted] = dataclasses.replace(rows[noted], message=PASSES)
    (found,) = differences(rows)
    assert (found.interval, found.text, found.blocks) == (None, None, 0)
    # What it says over seeds stays.
    assert found.test.difference == pytest.approx(0.2) and found.spread == pytest.approx(0.1)
    table = differences_table(rows)
    ((_, cells),) = table.rows
    notes = dict(note.split(" ", 1) for note in table.notes if note.startswith("["))
    assert [cells[column].text for column in (6, 8)] == ["–", "–"]
    for column in (6, 8):
        (mark,) = cells[column].marks
        assert "no independent draws: no statistics over text" in notes[mark]
    assert [notes[mark] for mark in cells[0].marks] == [PASSES]
    assert not any(note.startswith("over text") for note in table.notes)


def test_an_interval_of_windows_of_ten_passes_would_be_far_too_narrow() -> None:
    """Why: 526 values of text, cut ten times into 32 windows of 16 after a shuffle."""
    draw, hits = np.random.default_rng(0), 0
    for _ in range(40):
        text = draw.normal(size=526)
        passes = [draw.permutation(text)[:512].reshape(32, 16).mean(1) for _ in range(10)]
        low, high = bootstrap_interval(list(np.concatenate(passes)), [0.0] * 320)
        hits += low < 0 < high
    assert hits / 40 < 0.7  # of 95%


def test_one_block_of_text_has_no_interval() -> None:
    longer = {"eval_length": 2048, "stride": 2048, "windows": 1}
    rows = [
        *three_seeds(),
        *(dataclasses.replace(row, window_losses=[row.loss], **longer) for row in three_seeds()),
    ]
    table = differences_table(rows)
    assert [cells[6].text for _, cells in table.rows] == ["–", "–"]
    assert [cells[8].text for _, cells in table.rows] == ["–", "–"]
    assert any("one block of text, or no spread over blocks" in note for note in table.notes)
    assert all(cells[7].mean == pytest.approx(0.1) for _, cells in table.rows)


def test_table_shows_and_marks_them() -> None:
    table = differences_table(three_seeds())
    ((label, cells),) = table.rows
    # t = 2 sqrt(3), 2 degrees of freedom: p = 0.0742; its quantile 4.3027 / sqrt(3) is 2.484.
    assert label == "alibi, 1024"
    assert [cell.text for cell in cells] == [
        *("+0.2000", "3", "1.2214", "-0.0484 to +0.4484", "0.0742", "0.0742"),
        *("+0.1800 to +0.2200", "0.1000", "0.0200"),
    ]
    assert not any(cell.marks for cell in cells)
    text = to_markdown(table)
    assert "corrected over this table, tests: 1" in text and "t-test of losses over seeds" in text
    assert "2 blocks of consecutive windows, 1,024 tokens each" in text


def test_lines_without_a_common_seed_say_why() -> None:
    """Refused, failed on either side, other seeds: none of them vanishes."""
    rows = [
        row
        for row in study()
        if (row.method, row.eval_length) != ("kerple_log", 2048)
        and (row.method, row.eval_length, row.seed) != ("alibi", 1024, 3)
    ]
    out = {"status": "failed", "message": "out of memory"}
    rows += [make("kerple_log", seed, 2048, None, **out) for seed in (1, 2, 3)]
    rows += [make("alibi", 3, 1024, None, **out), make("rotary", 7, 512, 20.0)]
    table = differences_table(rows)
    lines = dict(table.rows)
    assert list(lines) == [
        *("alibi, 512", "alibi, 1024", "alibi, 2048"),
        *("learned, 512", "learned, 1024", "learned, 2048", "rotary, 512"),
    ]
    notes = dict(note.split(" ", 1) for note in table.notes if note.startswith("["))

    def said(label: str, column: int = 0) -> list[str]:
        return [notes[mark] for mark in lines[label][column].marks]

    assert lines["alibi, 512"][1].text == "3"
    assert lines["alibi, 1024"][1].text == "2"
    assert said("alibi, 1024", 1) == ["2 of 4 seeds; failed: out of memory"]
    assert lines["alibi, 2048"][0].text == "–"
    assert said("alibi, 2048") == ["kerple_log failed: out of memory"]
    assert lines["learned, 1024"][0].text == "refused"
    assert said("learned, 1024") == ["refused: cannot read 1024"]
    assert said("rotary, 512") == ["no common seed: 7, of kerple_log 1 2 3"]
    without = [row for row in study() if (row.method, row.eval_length) != ("kerple_log", 1024)]
    assert any(
        note.endswith("kerple_log not scored: no rows at this length")
        for note in differences_table(without).notes
    )


def test_holm_counts_the_tests_of_the_table() -> None:
    table = differences_table(study())
    rows = dict(table.rows)
    found = {d.label + f", {d.length}": d for d in differences(study())}
    assert list(rows) == list(found)
    rows, found = ({k: v[k] for k in rows if found[k].test} for v in (rows, found))
    assert list(rows) == ["alibi, 512", "alibi, 1024", "alibi, 2048", "learned, 512"]
    expected = holm([d.test.p_value for d in found.values()])
    for (name, cells), p_value in zip(rows.items(), expected, strict=True):
        assert cells[4].mean == found[name].test.p_value
        assert cells[5].mean == p_value
        assert cells[4].marks == (("†",) if cells[4].mean < 0.05 else ())
        assert cells[5].marks == (("†",) if cells[5].mean < 0.05 else ())
    assert any("† kerple_log is significantly better" in note for note in table.notes)
    better = differences_table(study(), reference="learned")
    assert any(note.startswith("‡ significantly better than learned") for note in better.notes)


def test_one_seed_leaves_the_bootstrap() -> None:
    table = differences_table([row for row in three_seeds() if row.seed == 2])
    ((_, cells),) = table.rows
    assert [cell.text for cell in cells[3:6]] == ["–", "–", "–"]
    assert cells[3].marks == ("[1]",) and "[1] one seed: no test" in table.notes
    assert cells[6].interval == pytest.approx((0.18, 0.22)) and cells[7].text == "–"
    assert table.notes[0] == "no test over seeds is possible here, only the bootstrap over text"


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
    assert table.rows[0][1][6].text == "–"
    assert any("windows of unequal size" in note for note in table.notes)


def test_other_formats() -> None:
    table = differences_table(three_seeds())
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    by_column = {line["column"]: line for line in lines}
    assert float(by_column["95% over text, low"]["mean"]) == pytest.approx(0.18, rel=1e-12)
    assert float(by_column["95% over text, high"]["mean"]) == pytest.approx(0.22, rel=1e-12)
    assert by_column["Δ loss"]["seeds"] == "3"
    latex = to_latex(table)
    assert r"$\Delta$ loss" in latex and r"95\% over seeds" in latex and "Δ" not in latex
