"""Charts of curves on the report's page, and the parts that hold them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import retrieval_row_cases
from analysis_rows import fields, kernel, make, study, training
from test_analysis_early import both
from test_analysis_report import Tree

from megatron_patches.analysis.line_charts import (
    MOST_POINTS,
    THINNED,
    Axes,
    Trace,
    line_chart,
    short,
    thinned,
)
from megatron_patches.analysis.report import UNFOLDED, Extras, report
from megatron_patches.analysis.rows import Row
from megatron_patches.analysis.sections import Source

AXES = Axes("title", "x", "y", "tokens")
TRACE = Trace("alibi", "alibi", 0, [0, 10, 20], [1.0, 3.0, 2.0], "a tip")


def points(node) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in node.attributes["points"].split()]


def svg_of(traces, axes=AXES):
    return Tree(line_chart(traces, axes)).root.all("svg")[0]


def test_a_curve_carries_its_numbers() -> None:
    chart = svg_of([replace(TRACE, lows=[0.5, 2.5, 1.5], highs=[1.5, 3.5, 2.5])])
    (trace,) = [n for n in chart.all("g") if n.attributes.get("class", "").startswith("trace ")]
    assert trace.attributes["data-x"] == "0 10 20" and trace.attributes["data-y"] == "1 3 2"
    assert trace.attributes["data-low"] == "0.5 2.5 1.5" and trace.all("title")[0].text == "a tip"
    low, high = (float(chart.attributes[f"data-scale-{end}"]) for end in ("low", "high"))
    assert (low, high) == pytest.approx((0.5 - 0.09, 3.5 + 0.09))  # 3% of the range
    line = points(trace.all("polyline")[0])
    top, bottom = (float(chart.attributes[f"data-{end}"]) for end in ("top", "bottom"))
    assert [y for _, y in line] == pytest.approx(
        [bottom - (v - low) / (high - low) * (bottom - top) for v in (1, 3, 2)], abs=0.06
    )
    assert len(points(trace.all("polygon")[0])) == 6


def test_staircases_hold_their_value() -> None:
    chart = svg_of([replace(TRACE, xs=[1, 4, 16], steps=True)], replace(AXES, logarithmic=True))
    (x0, y0), (x1, y1), (x2, y2), (x3, y3), (x4, y4) = points(chart.all("polyline")[0])
    assert (y0, y2) == (y1, y3) and x1 == x2 and x3 == x4 and y4 > y3
    assert x2 - x0 == pytest.approx(x4 - x2, abs=0.11)  # 1 to 4 as far as 4 to 16
    words = [n.text for n in chart.all("text")]
    assert {"1", "2", "4", "8", "16"} <= set(words)


def test_flat_and_single_points_are_drawn() -> None:
    for trace in (replace(TRACE, ys=[2.0] * 3), Trace("a", "a", 1, [5], [0.0], "tip")):
        chart = svg_of([trace])
        assert all(math.isfinite(v) for p in points(chart.all("polyline")[0]) for v in p)
        assert float(chart.attributes["data-scale-high"]) > float(
            chart.attributes["data-scale-low"]
        )


def test_thinning_keeps_the_ends_of_every_column() -> None:
    n = 10_000
    ys = [math.sin(i) + (9.0 if i == 1234 else -9.0 if i == 4321 else 0.0) for i in range(n)]
    long = Trace("a", "a", 0, list(range(n)), ys, "t", [y - 1 for y in ys], [y + 1 for y in ys])
    short_one = thinned(long, 100, [i / n for i in range(n)])
    assert len(short_one.xs) == 200 and list(short_one.xs) == sorted(short_one.xs)
    assert max(short_one.ys) == max(ys) and min(short_one.ys) == min(ys)
    assert max(short_one.highs) == max(ys) + 1 and min(short_one.lows) == min(ys) - 1
    assert thinned(TRACE, 100, [0, 0.5, 0.9]) is TRACE
    drawn = svg_of([long]).all("polyline")[0]
    assert len(points(drawn)) <= 2 * 496


def test_short_numbers() -> None:
    assert [short(v) for v in (0, 20, 1500, 4e6, 2.5e9)] == ["0", "20", "1.5k", "4M", "2.5G"]


def position(losses: list[float], **changes: object) -> Row:
    loss = math.fsum(losses) / len(losses)
    scores = {"loss": loss, "perplexity": math.exp(loss), "window_losses": [loss, loss]}
    return Row(**fields(protocol="position", position_losses=losses, **scores, **changes))


def test_every_kind_has_its_part() -> None:
    rows = [
        *study(),
        *(replace(row, train_length=256) for row in both(0.0)),
        *(position([2.0, 1.0]), position([2.0, 1.5], options={"sliding_window_width": 512})),
    ]
    heads = [kernel(h, searched_to=63, effective_length=end) for h, end in ((0, 13), (1, None))]
    # The same head of another length would be another run.
    heads += [kernel(0, train_length=128), kernel(0, dataset="code", bias=None, weight=[1.0] * 64)]
    runs = [training("alibi", 1), training("alibi", 2), training("rotary", 1, train_length=64,
                                                                 global_batch=32)]  # fmt: skip
    page = report([Source("r.jsonl", rows)], Extras(kernels=heads, training=runs))
    root = Tree(page).root
    titles = [node.text for node in root.all("h2")]
    for title in (
        "books, early-token effect, stride 128, split valid, trained on 256 tokens for 100 steps",
        "books, training on 512 tokens for 100 steps of 4 sequences",
        "books, training on 64 tokens for 100 steps of 32 sequences",
        "books, learned kernels",
        "books, learned kernels, trained on 128 tokens",
        "code, learned kernels",
    ):
        assert title in titles
    assert titles == sorted(titles, key=lambda text: text.split(",")[0])
    text = root.whole_text()
    for part in (
        "Loss by position, window of 1024 tokens, books",
        "above 0, the text beyond the window helps",
        "Effective length of heads in tokens",
        "curves end below the number of heads",
        "alibi, seed 2",
        "alibi: bias_p",
        "Training loss as logged, mean and range over seeds",
    ):
        assert part in text
    tips = [node.text for node in root.all("title")]
    assert "kerple_log: 1 of 2 heads end within 63 tokens (1 seed)" in tips
    assert "alibi: 3.0000 at 204,800 tokens (2 seeds)" in tips
    assert "alibi, window 512: 1.5000 at 768 tokens (1 seed)" in tips
    control = [
        n for n in root.all("g") if re.match(r"trace .* control$", n.attributes.get("class", ""))
    ]
    assert [n.attributes["data-label"] for n in control] == ["alibi, window 512"]
    folded = [n for n in root.all("details") if n.attributes.get("class") == "part"]
    assert len(folded) > UNFOLDED and not any("open" in n.attributes for n in folded)
    trained = {
        n.attributes["data-trained"] for n in root.all("section") if "data-trained" in n.attributes
    }
    assert trained == {"64", "128", "256", "512"}
    boxes = [n.attributes["value"] for n in root.all("input") if n.attributes["name"] == "trained"]
    assert boxes == ["64", "128", "256", "512"]


def test_a_long_training_is_thinned_and_says_so() -> None:
    count = MOST_POINTS + 1
    steps = list(range(1, count + 1))
    many = {"iterations": steps, "lm_loss": [3.0 + (k == 500) for k in steps], "position": {}}
    many |= {"learning_rate": [0.1] * count, "step": count, "train_iters": count}
    long = training("alibi", 1, tokens=2048 * count, **many)
    text = report([], Extras(training=[long]))
    assert THINNED in text and THINNED not in report([], Extras(training=[training("alibi", 1)]))
    (trace, *_) = [n for n in Tree(text).root.all("g") if n.attributes.get("data-label") == "alibi"]
    values = trace.attributes["data-y"].split()
    assert len(values) < count and "4" in values  # the one high value is kept


def test_retrieval_has_a_part_of_its_data_set() -> None:
    cells = retrieval_row_cases.study()
    root = Tree(report([Source("r", study())], Extras(retrieval=cells))).root
    (part,) = [n for n in root.all("section") if n.attributes.get("id") == "s2"]
    assert part.attributes["data-dataset"] == cells[0].dataset
    assert part.all("h2")[0].text == f"{cells[0].dataset}, retrieval, trained on 512 tokens"
    assert part.all("svg", "table")
    names = [n.attributes["value"] for n in root.all("input") if n.attributes["name"] == "method"]
    assert {"learned", "alibi"} <= set(names)


def test_what_may_not_meet_is_said_and_the_rest_stays() -> None:
    clash = [kernel(0), kernel(0, bias=[0.0] * 64), kernel(0, dataset="code")]
    runs = [
        training("alibi", 1),
        training("alibi", 1, config_sha="x"),
        training("a", 1, dataset="code"),
    ]
    spoiled = [replace(r, split="test") if r.protocol == "sliding" else r for r in both(0.0)]
    root = Tree(report([Source("r", [*study(), *spoiled])], Extras(clash, runs))).root
    said = [n.text for n in root.all("p") if n.attributes.get("class") == "refused"]
    assert any("two different kernels" in text for text in said)
    assert any("training runs of two configurations" in text for text in said)
    assert len(root.all("svg")) > 3 and "code, learned kernels" in root.whole_text()


def test_the_early_table_finds_its_text_among_several() -> None:
    """A study of one part of the text beside another study that scored more of it."""
    long = [replace(r, data="longer", tokens=4096, windows=2 * r.windows,
                    window_losses=r.window_losses * 2) for r in both(0.0)
            if r.protocol == "nonoverlap"]  # fmt: skip
    root = Tree(report([Source("a", long), Source("b", both(0.0))])).root
    titles = [n.text for n in root.all("h2")]
    assert titles[:2] == [
        f"books, protocol nonoverlap, split valid, trained on 512 tokens for 100 steps, {tokens} "
        f"tokens of data {data}"
        for tokens, data in (("4,096", "longer"), ("2,048", "text, nonoverlap"))
    ]
    (part,) = [n for n in root.all("section") if "early-token" in n.all("h2")[0].text]
    assert len(part.all("table")) == 1
    assert not [n for n in part.all("p") if n.attributes.get("class") == "refused"]
    tagged = {
        (n.attributes["data-method"], n.attributes["data-length"]) for n in part.all("tr")[1:]
    }
    assert tagged == {("alibi", "256"), ("alibi", "512"), ("alibi", "1024")}
    alone = [*long, *(r for r in both(0.0) if r.protocol == "sliding")]
    (part,) = [n for n in Tree(report([Source("a", alone)])).root.all("section")
               if "early-token" in n.all("h2")[0].text]  # fmt: skip
    assert "4096 tokens side by side" in part.whole_text()


def test_a_page_may_hold_models_alone() -> None:
    page = report([], Extras(training=[training("alibi", 1)]))
    assert (
        "training on 512 tokens" in page and "Made of 0 rows (beside them 1 training runs)" in page
    )
    assert report([Source("r", [make("alibi", 1, 512, 20.0)])]) == report(
        [Source("r", [make("alibi", 1, 512, 20.0)])]
    )
