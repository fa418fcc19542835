"""Tables: numbers, marks, refusals, and the text of each format."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from analysis_rows import fields, make, study

from data_prep.tokenizer import GPT2_FINGERPRINT
from megatron_patches.analysis.comparison import (
    GPT2,
    comparison_table,
    parameters_of,
    same_question,
    unlike,
)
from megatron_patches.analysis.layout import decimals, format_number
from megatron_patches.analysis.published import read_published
from megatron_patches.analysis.render import to_csv, to_latex, to_markdown
from megatron_patches.analysis.rows import Row, RowError
from megatron_patches.analysis.tables import (
    extrapolation_table,
    published_rows,
    published_table,
    relative_table,
)

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published.csv"

GOLDEN = """\
### Perplexity by evaluation length, books

dataset books, protocol nonoverlap, split valid, stride = window, 2,048 tokens in 4 / 2 / 1 windows  
1,000 parameters, trained on 512 tokens for 100 steps, seeds 1 2 3  
engine standalone, attention chunked, float32  
data data-1, tokenizer tok-1  
commit abc123  
configs alibi alibi1 alibi2 alibi3; kerple_log kerple_log1 kerple_log2 kerple_log3; learned learned1 learned2 learned3  
mean ± standard deviation (n - 1) over 3 seeds

| method | 512 | 1024 | 2048 |
|---|---:|---:|---:|
| alibi | **23.9±0.2** | 22.6±0.1† | 22.5±0.6† |
| kerple_log | 23.9±0.1 | **22.1±0.1** | **21.5±0.5** |
| learned | 25.1±0.2† | refused [1] | refused [2] |

† kerple_log is significantly better (paired two-sided t-test of perplexities over seeds, as in the paper, p \\< 0.05, cells tested: 4, not corrected)  
[1] refused: cannot read 1024  
[2] refused: cannot read 2048
"""  # noqa: E501, W291  (the text of a document, where two spaces end a line)

GOLDEN_LATEX = r"""\begin{table}
\centering
\caption{Published: KERPLE, Table 3, perplexity, github}
\begin{tabular}{lrr}
\toprule
method & 512 & 1024 \\
\midrule
kerple\_log & \textbf{\boldmath 3.40$\pm$0.20} & \textbf{\boldmath 3.04$\pm$0.14} \\
alibi & 3.42$\pm$0.21 & 3.15$\pm$0.17\textsuperscript{$\dagger$} \\
\bottomrule
\end{tabular}
\par\medskip\footnotesize\raggedright
162M parameters, trained on 512 tokens\par
$\dagger$ kerple\_log is significantly better, as the paper marks it\par
\end{table}
"""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((2.714, "2.71"), (30046.4, "30046"), (23.94, "23.9"), (750.4, "750"), (0.8951, "0.895")),
        *((9.996, "10.0"), (99.96, "100"), (0.9996, "1.00"), (1e6, "1.00e+06"), (0.0, "0.000")),
        *((999_999.4, "999999"), (999_999.6, "1.00e+06")),
    ],
)
def test_number_format(value: float, text: str) -> None:
    assert format_number(value) == text
    assert decimals(value) <= 3


def test_markdown_golden() -> None:
    assert to_markdown(extrapolation_table(study())) == GOLDEN
    assert to_markdown(extrapolation_table(study()[::-1])) == GOLDEN


def test_a_cell_that_beats_the_reference_is_marked_too() -> None:
    table = extrapolation_table(study(), reference="alibi", methods=["alibi", "kerple_log"])
    (_, ours) = table.rows[1]
    assert [cell.marks for cell in ours] == [(), ("‡",), ("‡",)]
    assert table.notes[0].startswith(
        "‡ significantly better than alibi (paired two-sided t-test of perp"
    )


def test_one_seed_has_no_spread_and_no_test() -> None:
    table = extrapolation_table([row for row in study() if row.seed == 1])
    assert all(cell.spread == "" and cell.std is None for _, row in table.rows for cell in row)
    assert table.header[-1] == "one seed: no standard deviation and no test"
    assert table.notes[0].startswith("no test")
    assert not any("†" in cell.marks for _, row in table.rows for cell in row)
    alone = extrapolation_table(study(), methods=["alibi"])
    assert alone.notes == ("no test: there are no rows of kerple_log to test against",)


def test_missing_seeds_are_counted_and_cannot_win() -> None:
    rows = [*study(), make("rotary", 1, 512, 20.0), make("rotary", 2, 512, None)]
    table = extrapolation_table(rows)
    ((_, cells),) = [row for row in table.rows if row[0] == "rotary"]
    assert cells[0].text == "20.0" and not cells[0].bold
    assert dict(table.rows)["alibi"][0].bold
    assert [cell.text for cell in cells[1:]] == ["–", "–"]
    note = f"{cells[0].marks[0]} 1 of 3 seeds; refused: cannot read 512"
    assert note in table.notes


def test_variants_of_a_method_stay_apart() -> None:
    window = {"options": {"window": 512}, "config_sha": "same"}
    rows = [make("alibi", 1, 512, 20.0, config_sha="same"), make("alibi", 1, 512, 21.0, **window)]
    assert [label for label, _ in extrapolation_table(rows).rows] == ["alibi", "alibi (window=512)"]
    twice = [make("alibi", 1, 512, 20.0, config_sha=sha) for sha in ("one", "two")]
    with pytest.raises(RowError, match=r"alibi, seed 1, length 512: .* \(one and two\)"):
        extrapolation_table(twice)


@pytest.mark.parametrize("make_table", [extrapolation_table, relative_table])
def test_mixed_fingerprints_are_refused(make_table) -> None:
    with pytest.raises(RowError, match=r"cannot be compared, they differ in: data "):
        make_table([*study(), make("rotary", 1, 512, 20.0, data="data-2")])
    with pytest.raises(RowError, match="no rows of rotary; there are alibi, kerple_log, learned"):
        make_table(study(), methods=["alibi", "rotary"])
    with pytest.raises(RowError, match="no rows"):
        make_table([])


def test_header_keeps_a_dirty_commit_and_cuts_hashes() -> None:
    rows = [make("alibi", 1, 512, 20.0, git_sha="0123456789abcdef" * 2 + "-dirty")]
    assert "commit 0123456789ab-dirty" in extrapolation_table(rows).header


def test_published_table_prints_the_papers_digits() -> None:
    rows = read_published(PUBLISHED)
    table = published_table(rows, table="Table 3", dataset="openwebtext2")
    assert table.columns == ("512", "1024", "2048", "4096", "8192", "16384")
    cells = dict(table.rows)
    assert list(cells) == ["kerple_log", "kerple_power", "alibi", "rpe", "rotary", "sinusoidal"]
    assert (cells["kerple_log"][1].text, cells["kerple_log"][1].spread) == ("22.0", "0.6")
    assert (cells["rotary"][5].text, cells["rotary"][5].spread) == ("269", "33.0")
    assert cells["rotary"][5].marks == ("†",) and cells["kerple_log"][5].bold
    assert cells["rpe"][0].bold and not cells["kerple_log"][0].bold
    with pytest.raises(RowError, match="nothing published for KERPLE Table 3, books.*arxiv"):
        published_table(rows, table="Table 3", dataset="books")
    with pytest.raises(RowError, match="nothing published.*there is nothing"):
        published_table(rows, table="Table 99", dataset="github")
    missing = published_table(rows, paper="ALiBi", table="Table 2", dataset="wikitext103")
    assert missing.notes == ("[1] out of memory",)


def test_latex_golden() -> None:
    rows = [
        row
        for row in read_published(PUBLISHED)
        if row.method in ("kerple_log", "alibi") and row.eval_length <= 1024
    ]
    assert to_latex(published_table(rows, table="Table 3", dataset="github")) == GOLDEN_LATEX


def test_relative_table_by_hand() -> None:
    published = published_rows(read_published(PUBLISHED), "Table 3", "openwebtext2")
    table = relative_table(study(), published)
    assert table.columns == ("×1", "×2", "×4", "×8", "×16", "×32")
    cells = dict(table.rows)
    assert list(cells) == [
        "alibi, ours",
        "alibi, KERPLE Table 3",
        "kerple_log, ours",
        "kerple_log, KERPLE Table 3",
        "learned, ours",
    ]
    # Each seed's own ratio, then the mean.
    mean = (22.0 / 23.8 + 22.1 / 23.9 + 22.2 / 24.0) / 3
    assert cells["kerple_log, ours"][1].mean == pytest.approx(mean, rel=1e-12)
    assert cells["kerple_log, KERPLE Table 3"][5].mean == pytest.approx(21.4 / 23.9, rel=1e-12)
    assert cells["kerple_log, KERPLE Table 3"][5].text == "0.895"
    assert [cell.text for cell in cells["learned, ours"]] == [
        *("1.000", "refused", "refused"),
        *"–––",
    ]
    assert "only the trend" in table.notes[0]


def test_relative_table_lines_up_other_training_lengths() -> None:
    rows = [make("alibi", 1, length, 20.0 + length, train_length=128) for length in (128, 256)]
    published = published_rows(read_published(PUBLISHED), "Table 3", "github")
    table = relative_table(rows, published)
    assert table.columns[:2] == ("×1", "×2")
    assert dict(table.rows)["alibi, ours"][1].mean == pytest.approx(276 / 148)
    unscored = relative_table([make("alibi", 1, 1024, 20.0)])
    assert unscored.columns == ("×2",) and unscored.rows[0][1][0].marks == ("[1]",)
    assert unscored.notes == ("[1] no ratio: not scored at the training length with the same seed",)


def test_relative_cells_share_their_decimals() -> None:
    """1.00±0.00 beside 0.998±0.000 would read as if the one were known less well than the other."""
    values = {512: (20.0, 21.0), 1024: (19.96, 20.95), 2048: (20.1, 21.3), 4096: (300.0, 301.0)}
    rows = [make("alibi", seed, n, v[seed - 1]) for n, v in values.items() if n < 4096
            for seed in (1, 2)]  # fmt: skip
    far = {"windows": 1, "tokens": 4096, "eval_length": 4096, "stride": 4096}
    rows += [
        make("alibi", seed, 2048, value, window_losses=[math.log(value)], **far)
        for seed, value in enumerate(values[4096], 1)
    ]
    table = relative_table(rows)
    ratios = np.asarray([values[n] for n in (512, 1024, 2048, 4096)]) / np.asarray(values[512])
    shown = [(f"{r.mean():.3f}", f"{r.std(ddof=1):.3f}") for r in ratios[:3]]
    assert shown[:2] == [("1.000", "0.000"), ("0.998", "0.000")]
    assert [(cell.text, cell.spread) for cell in table.rows[0][1][:3]] == shown
    last = table.rows[0][1][3]
    assert (last.text, last.spread) == (f"{ratios[3].mean():.1f}", f"{ratios[3].std(ddof=1):.1f}")
    assert table.header[-1] == "mean ± standard deviation (n - 1) over 2 seeds"


def test_what_scored_rows_say_is_a_footnote() -> None:
    """Of every number made of such a row, also of a ratio to one."""
    passes = "the split fills fewer than 320 windows: 4 shuffled passes over it"
    rows = [
        make(m, 1, n, 20.0, message=passes if (m, n) in said else None)
        for m in ("alibi", "rotary")
        for n in (512, 1024)
        for said in [{("alibi", 512), ("rotary", 1024)}]
    ]
    for table, marked in (
        (extrapolation_table(rows), [[True, False], [False, True]]),
        (relative_table(rows), [[True, True], [False, True]]),
    ):
        assert [[bool(cell.marks) for cell in cells] for _, cells in table.rows] == marked
        assert table.notes[-1] == f"[1] {passes}"


def test_relative_cells_say_what_is_missing() -> None:
    out = {"status": "failed", "message": "out of memory"}
    rows = [row for row in study() if (row.method, row.eval_length, row.seed) != ("alibi", 2048, 3)]
    rows = [r for r in rows if (r.method, r.eval_length, r.seed) != ("kerple_log", 512, 1)]
    rows += [make("alibi", 3, 2048, None, **out), make("kerple_log", 1, 512, None, **out)]
    table = relative_table(rows)
    lines = dict(table.rows)
    notes = dict(note.split(" ", 1) for note in table.notes)

    def said(label: str, column: int) -> list[str]:
        return [notes[mark] for mark in lines[label][column].marks]

    assert said("alibi", 2) == ["2 of 3 seeds; failed: out of memory"] and not said("alibi", 1)
    assert lines["alibi"][2].mean == pytest.approx((22.0 / 23.7 + 22.4 / 24.0) / 2, rel=1e-12)
    assert said("kerple_log", 1) == ["2 of 3 seeds; failed: out of memory"]
    assert (lines["learned"][1].text, said("learned", 1)) == (
        "refused",
        ["refused: cannot read 1024"],
    )


def like_the_papers(**changes: object) -> list[Row]:
    """Two methods trained as the paper's on its data set, of its size, tokenizer and training length."""
    size = {"dataset": "openwebtext2", "parameters": 170_000_000, "step": 50_000}
    size |= {"tokenizer": GPT2_FINGERPRINT, **changes}
    values = {"kerple_log": {512: (23.5, 24.1), 1024: (22.3, 22.5)}, "none": {512: (25.0, 26.0)}}
    return [
        make(method, seed, length, value, **size)
        for method, lengths in values.items()
        for length, pair in lengths.items()
        for seed, value in enumerate(pair, 1)
    ]


def test_ours_beside_the_papers_with_the_difference() -> None:
    published = published_rows(read_published(PUBLISHED), "Table 3", "openwebtext2")
    table = comparison_table(like_the_papers(), published)
    assert table.columns[:2] == ("512", "1024") and len(table.columns) == 6
    cells = dict(table.rows)
    assert list(cells) == [
        *("kerple_log, ours", "kerple_log, KERPLE Table 3", "kerple_log, difference"),
        "none, ours",
    ]
    # The paper has 23.9 and 22.0 there.
    assert [cell.text for cell in cells["kerple_log, ours"]][:2] == ["23.8", "22.4"]
    assert (cells["kerple_log, KERPLE Table 3"][1].text) == "22.0"
    apart = cells["kerple_log, difference"]
    assert [cell.text for cell in apart] == ["-0.1", "+0.4", "–", "–", "–", "–"]
    assert apart[0].mean == pytest.approx((23.5 + 24.1) / 2 - 23.9, rel=1e-9)
    assert any(line.startswith("data data-1, tokenizer c9c1848c2041") for line in table.header)
    assert any(line.startswith("published: 162M parameters") for line in table.header)


@pytest.mark.parametrize(
    ("unlike", "told"),
    [
        ({"dataset": "code"}, "data set code, theirs openwebtext2"),
        ({"parameters": 860_000}, "860,000 parameters, theirs 162M"),
        ({"train_length": 256}, "trained on 256 tokens, theirs 512"),
        ({"tokenizer": "bytes"}, "tokenizer bytes, theirs c9c1848c204159d7 (GPT-2's)"),
        ({"step": 10}, "10 training steps, theirs 50,000"),
        ({"step": 45_000}, "45,000 training steps, theirs 50,000"),
        ({"step": 150_000}, "150,000 training steps, theirs 50,000"),
        (
            {"tokenizer": "bytes", "step": 0},
            "tokenizer bytes, theirs c9c1848c204159d7 (GPT-2's); 0 training steps, theirs 50,000",
        ),
    ],
)
def test_unlike_models_are_compared_by_their_trend(unlike: dict, told: str) -> None:
    published = published_rows(read_published(PUBLISHED), "Table 3", "openwebtext2")
    rows = like_the_papers(**unlike)
    if "train_length" in unlike:
        rows += [replace(rows[0], eval_length=256, stride=256)]
    table = comparison_table(rows, published, methods=["kerple_log"])
    assert table.title.startswith("Perplexity relative to that at the training length")
    cells = dict(table.rows)
    assert cells["kerple_log, difference"][0].text == "+0.000"
    if "train_length" not in unlike:
        ours = (22.3 / 23.5 + 22.5 / 24.1) / 2
        assert cells["kerple_log, difference"][1].mean == pytest.approx(ours - 22.0 / 23.9)
        assert cells["kerple_log, difference"][1].text == f"{ours - 22.0 / 23.9:+.3f}"
    assert "only the trend" in table.notes[0] and table.notes[1] == f"Here: {told}."


def test_the_papers_steps_and_tokenizer() -> None:
    """Table 9 holds two models; papers whose training is not known here are compared by their trend."""
    rows = read_published(PUBLISHED)
    long, large = (
        published_rows(rows, "Table 9", "github", train_length=length) for length in (1024, 512)
    )
    assert same_question(like_the_papers(dataset="github", train_length=1024), long)
    ours = {"parameters": 1_400_000_000, "dataset": "github", "step": 150_000}
    assert same_question(like_the_papers(**ours), large)
    assert not same_question(like_the_papers(**{**ours, "step": 50_000}), large)
    assert same_question(
        like_the_papers(step=46_000), published_rows(rows, "Table 3", "openwebtext2")
    )
    words = published_rows(rows, "Table 2", "wikitext103", paper="ALiBi")
    ours = {"parameters": 247_000_000, "dataset": "wikitext103"}
    assert unlike(like_the_papers(**ours), words) == [
        "tokenizer and training steps of ALiBi, Table 2 are not known"
    ]
    assert GPT2 == GPT2_FINGERPRINT


def test_sizes_of_published_models() -> None:
    assert [parameters_of(model) for model in ("162M", "1.3B")] == [162e6, 1.3e9]
    for bad in ("", "M", "large", "162"):
        with pytest.raises(RowError, match="no size such as 162M"):
            parameters_of(bad)


def test_csv_has_one_line_a_cell_with_full_precision() -> None:
    records = list(csv.DictReader(io.StringIO(to_csv(extrapolation_table(study())))))
    assert len(records) == 9
    first = records[0]
    assert (first["method"], first["column"], first["seeds"], first["best"]) == (
        *("alibi", "512", "3"),
        "yes",
    )
    assert float(first["mean"]) == pytest.approx((23.7 + 24.0 + 23.9) / 3, rel=1e-15)
    assert records[-1]["text"] == "refused" and records[-1]["mean"] == ""
    assert "split valid" in first["source"]


def test_special_characters_are_escaped() -> None:
    row = Row(**fields(method="a|b*_%&", dataset="x<y"))
    markdown, latex = to_markdown(extrapolation_table([row])), to_latex(extrapolation_table([row]))
    assert r"| a\|b\*_%& |" in markdown and r"x\<y" in markdown
    assert r"a\textbar{}b*\_\%\& & " in latex and r"x\textless{}y" in latex
