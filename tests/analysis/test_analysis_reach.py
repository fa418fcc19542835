"""How far heads reach: the stored exact length, against closed forms; curves and quantiles."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from analysis_rows import kernel

from megatron_patches.analysis.figures_kernels import kernel_figure, kernel_panels
from megatron_patches.analysis.figures_reach import reach_figure, steps_of
from megatron_patches.analysis.kernels import (
    UNEVEN,
    WEIGHT_IGNORED,
    KernelSet,
    described,
    distinct_kernels,
    effective_length,
    extent,
    kernel_sets,
    reach,
    reaches,
)
from megatron_patches.analysis.reach_table import cumulative, quantile, reach_table
from megatron_patches.analysis.rows import KernelRow, RowError, append_kernels, read_kernels
from megatron_patches.analysis.style import CONTEXT, line_style
from megatron_patches.positions import build
from megatron_patches.standalone.kernels import effective_lengths, kernel_rows

ALIBI_12 = [3, 5, 6, 9, 12, 17, 23, 33, 65, 129, 257, 513]


def ended(*lengths: int | None, seed: int = 1, **changes: object) -> list[KernelRow]:
    """A head for each effective length, searched to 1000."""
    return [
        kernel(head, seed=seed, searched_to=1000, effective_length=length, **changes)
        for head, length in enumerate(lengths)
    ]


def written(name: str, heads: int = 12, **numbers: list[float]) -> list[KernelRow]:
    """The rows that a model with this method writes, with these parameters."""
    method = build(name, heads=heads, head_dim=64, hidden_size=64 * heads)
    with torch.no_grad():
        for key, values in numbers.items():
            method.get_parameter(key).copy_(torch.tensor(values)[:, None, None])
    config = SimpleNamespace(pos_emb=name, dataset_name="books", seed=1, seq_length=512)
    model = torch.nn.Linear(9, 9)
    model.methods = [method]
    return kernel_rows(model, config, 10, options={"a": 1}, config_sha="c0ffee")


def test_alibi_is_pinned() -> None:
    rows = written("alibi")
    assert sorted(reach(row) for row in rows) == ALIBI_12
    assert {(row.train_length, row.searched_to) for row in rows} == {(512, 16384)}
    assert rows[0].options == {"a": 1}
    assert {(row.config_sha, row.model_parameters) for row in rows} == {("c0ffee", 90)}
    # Distances are sampled at 8 an octave: from the samples alone, 513 would be 558.
    plain = [dataclasses.replace(row, searched_to=None, effective_length=None) for row in rows]
    assert max(reach(row) for row in plain) == 558


def test_the_writer_equals_the_closed_forms() -> None:
    generator = torch.Generator().manual_seed(3)
    scale = (0.3 + 1.7 * torch.rand(40, generator=generator, dtype=torch.float64)).tolist()
    rate = (0.2 + 0.8 * torch.rand(40, generator=generator, dtype=torch.float64)).tolist()
    log = written("kerple_log", 40, bias_p=scale, bias_a=rate)
    power = written("kerple_power", 40, bias_a=scale, bias_p=rate)
    checked = 0
    for rows, formula in (
        (log, lambda r1, r2: (math.exp(2 / r1) - 1) / r2),
        (power, lambda r1, r2: (2 / r1) ** (1 / r2)),
    ):
        for row, r1, r2 in zip(rows, scale, rate, strict=True):
            exact = formula(r1, r2)
            if exact > 16384:
                assert reach(row) is None
            elif abs(exact - round(exact)) > 1e-3 * exact:  # else float32 may round either way
                assert reach(row) == math.floor(exact) + 1
                checked += 1
    assert checked > 50


def test_a_bias_that_returns_counts_its_first_crossing() -> None:
    table = torch.tensor([[0.0, -2.0, -2.1, 1.0, -9.0], [-3.0] * 5, [5.0] * 5])
    assert effective_lengths(table) == [2, None, None]


def test_a_constant_changes_no_effective_length() -> None:
    """Softmax does not see what all biases of a head have in common."""
    bias = [0.0, -1.0, -2.0, -2.5, -2.4]
    for constant in (0.0, 3.0, -7.0):
        moved = [value + constant for value in bias]
        assert effective_length(range(5), moved) == 3
        assert effective_lengths(torch.tensor([moved])) == [3]
    # p exp(-a d^2) with p = 4, a = 0.1: 4 (1 - exp(-0.1 d^2)) > 2 from d^2 > 10 ln 2 = 6.93.
    gauss = kernel(0, bias=[4 * math.exp(-0.1 * d * d) for d in range(64)])
    assert reach(gauss) == 3
    heads = written("kerple_gauss2", 2, bias_p=[4.0, 1.9], bias_a=[0.1, 0.1])
    assert [reach(row) for row in heads] == [3, None]
    # Rows of before took the bias as it is: right where it is 0 at distance 0, else searched anew.
    old = {"searched_to": 63, "effective_length": None}
    assert reach(kernel(0, bias=gauss.bias, **old)) == 3
    assert reach(kernel(0, bias=gauss.bias, config_sha="new", **old)) is None
    assert reach(kernel(0, searched_to=63, effective_length=7)) == 7


def test_extent_is_the_integral_by_trapezoids() -> None:
    at = [0, 1, 2, 4, 8]
    assert extent(at, [5.0] * 5, additive=True) == pytest.approx(8.0)
    halves = [math.log(0.5) * (d > 0) + 3 for d in at]  # 1 at 0, then 1/2: 0.75 + 7 / 2
    assert extent(at, halves, additive=True) == pytest.approx(4.25)
    assert extent(at, [0.5, 0.25, 0.25, 0.25, 0.25], additive=False) == pytest.approx(4.25)
    assert extent(at, [0.0] * 5, additive=False) == 0.0
    # Three bumps above 0: the sum of exp(min(bias, 0)) was 64 for each.
    widths = [
        kernel(0, bias=[2 * math.exp(-a * d * d) for d in range(64)]) for a in (0.1, 0.01, 0.001)
    ]
    found = [extent(row.distances, row.bias or [], additive=True) for row in widths]
    assert found == sorted(found) and found[0] < 0.8 * found[2]


def test_methods_without_a_bias_have_no_length() -> None:
    rows = written("kerple_weight", 4)
    assert [reach(row) for row in rows] == [None] * 4 and rows[0].searched_to is None
    assert written("rotary", 4) == []
    assert reaches(rows) == {}
    with pytest.raises(RowError, match="nothing has an effective length"):
        reach_figure(rows)
    with pytest.raises(RowError, match="nothing has an effective length"):
        reach_table(rows)


def test_old_rows_still_read(tmp_path: Path) -> None:
    record = dataclasses.asdict(kernel(0))
    for name in KernelRow.ADDED:
        del record[name]
    (tmp_path / "old.jsonl").write_text(json.dumps(record) + "\n")
    (row,) = read_kernels(tmp_path / "old.jsonl")
    assert row == kernel(0) and reach(row) == 13
    append_kernels(tmp_path / "new.jsonl", ended(7))
    assert [reach(row) for row in read_kernels(tmp_path / "new.jsonl")] == [7]
    del record["bias"]
    (tmp_path / "old.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(RowError, match=":1: missing bias"):
        read_kernels(tmp_path / "old.jsonl")
    for changes in ({"effective_length": 5}, {"effective_length": 5, "searched_to": 4}):
        with pytest.raises(RowError, match="effective_length: 5, but searched to"):
            kernel(0, **changes)
    assert kernel(0, effective_length=0, searched_to=0).effective_length == 0


def test_one_kernel_a_head_and_run() -> None:
    first, later = kernel(0), kernel(0, step=200)
    assert distinct_kernels([first, later, later]) == [first, later]
    exact = kernel(0, searched_to=63, effective_length=13)
    assert distinct_kernels([exact, first]) == [exact] == distinct_kernels([first, exact])
    named = kernel(0, config_sha="a", model_parameters=5)
    assert distinct_kernels([first, named]) == [named] == distinct_kernels([named, exact])
    two = [kernel(0, train_length=128), kernel(0, train_length=512, bias=[0.0] * 64)]
    assert set(kernel_sets(two)) == {("books", 128, 100, 0), ("books", 512, 100, 0)}
    with pytest.raises(RowError, match="head 0: two different kernels"):
        distinct_kernels([kernel(0), kernel(0, bias=[0.0] * 64)])


def test_no_run_hides_another() -> None:
    """Other steps and sizes are sets of their own; two configurations of one label are refused."""
    short = [kernel(h, step=400, config_sha="s", model_parameters=1000) for h in (0, 1)]
    long = [kernel(h, step=2000, config_sha="l", model_parameters=1000) for h in (0, 1)]
    large = [kernel(h, step=2000, config_sha="b", model_parameters=9000) for h in (0, 1)]
    sets = kernel_sets([*large, *short, *long])
    assert [(key.step, key.size, len(rows)) for key, rows in sets.items()] == [
        *((400, 0, 2), (2000, 0, 2), (2000, 1, 2)),
    ]
    assert list(described(sets).values()) == [
        *("books, step 400", "books, step 2000, size 1", "books, step 2000, size 2"),
    ]
    assert described([KernelSet("books", 512, 1, 0)]) == {
        ("books", 512, 1, 0): "books, trained on 512"
    }
    labels = [label for label, _ in reach_table([*short, *long]).rows]
    assert labels == ["kerple_log, books, step 400", "kerple_log, books, step 2000"]
    for made in (reaches, reach_figure, kernel_figure):
        with pytest.raises(RowError, match=r"step (400|2000).* step (400|2000)"):
            made([*short, *long])
    other = [dataclasses.replace(row, config_sha="x", bias=[0.0] * 64) for row in long]
    for made in (reaches, reach_figure, kernel_figure, reach_table):
        with pytest.raises(
            RowError, match=r"kerple_log, books, seed 1: .*config_sha l.*config_sha x"
        ):
            made([*long, *other])
    assert reaches([*long, *(dataclasses.replace(row, seed=2) for row in other)])


def test_both_parts_of_a_product_kernel_are_drawn() -> None:
    weight = [math.exp(-0.1 * d) for d in range(64)]
    heads = [kernel(h, method="both", weight=weight) for h in (0, 1)]
    panels = kernel_panels([*heads, kernel(0)])
    assert [(panel.title, panel.part) for panel in panels] == [
        *(("both, step 100, bias", "bias"), ("both, step 100, weight", "weight")),
        ("kerple_log, step 100", "bias"),
    ]
    figure = kernel_figure(heads)
    assert [axes.get_ylabel() for axes in figure.axes] == ["bias", "weight"]
    assert list(figure.axes[1].get_lines()[0].get_ydata()) == weight
    told = figure.texts[-1].get_text()
    assert WEIGHT_IGNORED + "both" in told.replace("\n", " ")
    assert reach_table(heads).notes == (WEIGHT_IGNORED + "both", UNEVEN)


def test_panels_show_the_fall_from_distance_0_and_fit_the_data() -> None:
    heads = [kernel(h, bias=[(0.5 + h) * math.exp(-0.1 * d) for d in range(64)]) for h in (0, 1)]
    (panel,) = kernel_panels(heads)
    assert panel.name == "bias(d) - bias(0)" and panel.curves[0][0] == 0.0
    low, high = panel.limits
    assert -1.7 < low < -1.4 and 0 < high < 0.1
    (axes,) = kernel_figure(heads).axes
    assert axes.get_ylim() == pytest.approx((low, high))
    assert len(axes.get_lines()) == 2  # no threshold, no dots: nobody falls so far
    steep = kernel_panels([kernel(0, bias=[-1.0 * d for d in range(64)])])[0]
    assert steep.limits == pytest.approx((-10, 0.4)) and steep.name == "bias"


def test_a_narrow_figure_keeps_its_caption_inside() -> None:
    figure = kernel_figure([kernel(0, train_length=512)])
    figure.draw_without_rendering()
    box = figure.texts[-1].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width
    assert box.y1 < figure.axes[0].get_tightbbox().y0


def test_many_methods_have_a_panel_each() -> None:
    rows = [row for k in range(7) for row in ended(3 + k, 50, method=f"m{k}")]
    figure = reach_figure(rows)
    assert [axes.get_title(loc="left") for axes in figure.axes[:7]] == [f"m{k}" for k in range(7)]
    for place, axes in enumerate(figure.axes[:7]):
        *context, own = axes.get_lines()
        assert len(context) == 7 and {line.get_color() for line in context} == {CONTEXT}
        assert own.get_color() == line_style(place)["color"]
        assert list(own.get_xdata()) == [1, 3 + place, 50, 1000]
    assert len(reach_figure(rows[:12]).axes) == 1


def test_cumulative_and_quantiles_by_hand() -> None:
    heads = [3, 5, 9, None]
    assert [cumulative(heads, d) for d in (2, 3, 4, 5, 9, 10_000)] == [0, 1, 1, 2, 3, 3]
    assert [quantile(heads, q) for q in (0, 0.25, 0.26, 0.5, 0.75, 0.76)] == [3, 3, 5, 5, 9, None]
    at, counts, mean = steps_of([[3, 5], [0, None]], 100)
    assert at == [1, 3, 5, 100]
    assert counts == [[0, 1, 2, 2], [1, 1, 1, 1]] and mean == [0.5, 1.0, 1.5, 1.5]


def test_table_of_quantiles() -> None:
    rows = ended(3, 5, train_length=512, step=10)
    rows += ended(9, None, seed=2, train_length=512, step=10)
    other = written("alibi")
    table = reach_table([*rows, *other, kernel(0, dataset="code")])
    lines = {label: [cell.text for cell in cells] for label, cells in table.rows}
    assert lines["kerple_log, books, trained on 512"] == ["2", "4", "1", "3", "3", "5", "9", "–"]
    alibi = lines["alibi (a=1), books, trained on 512"]
    assert alibi == ["1", "12", "0", "3", "6", "17", "65", "513"]
    assert lines["kerple_log, code"][:4] == ["1", "1", "0", "13"]
    assert table.notes == (UNEVEN,) and reach_table(rows).notes == ()


def test_figure_counts_heads() -> None:
    rows = ended(3, 5) + ended(9, None, seed=2)
    (axes,) = reach_figure([*rows, *ended(2, 2, method="alibi", parameters={})]).axes
    assert axes.get_xscale() == "log" and axes.get_xlim() == (1, 1000)
    alibi, *single, mean = axes.get_lines()
    assert list(alibi.get_xdata()) == [1, 2, 1000] and list(alibi.get_ydata()) == [0, 2, 2]
    assert [list(line.get_ydata()) for line in single] == [[0, 1, 2, 2, 2], [0, 0, 0, 1, 1]]
    # The curve ends below the two heads: one of them never ends.
    assert list(mean.get_ydata()) == [0, 0.5, 1, 1.5, 1.5]
    with pytest.raises(RowError, match="several data sets, training lengths"):
        reach_figure([*rows, kernel(0, dataset="code")])
