"""Figures hold the numbers of the rows, and the same rows give the same bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from analysis_rows import fields, kernel, make, study

from megatron_patches.analysis import style
from megatron_patches.analysis.figures import perplexity_figure
from megatron_patches.analysis.figures_kernels import kernel_figure
from megatron_patches.analysis.figures_position import position_figure
from megatron_patches.analysis.figures_reach import reach_figure
from megatron_patches.analysis.looks import numbered
from megatron_patches.analysis.report import report
from megatron_patches.analysis.rows import Row, RowError
from megatron_patches.analysis.sections import Source
from megatron_patches.analysis.style import line_style, save, spread


def figure_text(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def test_a_hole_is_a_gap_and_named() -> None:
    rows = [
        make(row.method, row.seed, row.eval_length, None, status="failed", message="out of memory")
        if (row.method, row.eval_length) == ("alibi", 1024)
        or (row.method, row.eval_length, row.seed) == ("kerple_log", 2048, 2)
        else row
        for row in study()
        if row.method != "learned"
    ]
    rows += [make("rotary", seed, 512, 23.0) for seed in (1, 2, 3)]
    rows += [
        make("none", s, n, None, status="failed", message="lost") for s in (1, 2) for n in (512,)
    ]
    figure = perplexity_figure(rows)
    line = figure.axes[0].get_lines()[0]
    assert list(line.get_xdata()) == [512, 1024, 2048]
    assert math.isnan(line.get_ydata()[1]) and not math.isnan(line.get_ydata()[2])
    told = figure_text(figure)
    assert "not drawn: alibi at 1024 (failed: out of memory)" in told
    assert "none at 512 (failed: lost)" in told and "rotary at 1024, 2048 (no row)" in told
    assert "fewer seeds: kerple_log at 2048: 2 of 3 seeds (failed: out of memory)" in told


def test_what_scored_rows_say_stands_at_the_foot_and_in_the_report() -> None:
    passes = "4 shuffled passes over it"
    losses = {"position_losses": [math.log(20.0)] * 4}
    rows = [
        make("alibi", seed, n, 20.0, message=passes if n > 512 else None, **losses)
        for seed in (1, 2)
        for n in (512, 1024, 2048)
    ]
    assert f"at 1024, 2048: {passes}" in figure_text(perplexity_figure(rows))
    assert f"at 1024: {passes}" in figure_text(position_figure(rows, eval_length=1024))
    assert passes not in figure_text(position_figure(rows, eval_length=512))
    page = report([Source("rows", rows)])
    assert f"at 1024, 2048: {passes}" in page and f"[1] {passes}" in page


def test_ticks_of_exploding_methods_and_room_for_the_foot() -> None:
    rows = [make("rotary", s, n, p) for s in (1, 2, 3) for n, p in ((512, 24.0), (2048, 1e30))]
    figure = perplexity_figure([*study(), *rows])
    low, high = figure.axes[0].get_ylim()
    inside = [tick for tick in figure.axes[0].get_yticks() if low <= tick <= high]
    assert high > 1e29 and len(inside) >= 4
    before = figure.get_figheight()
    style.footer(figure, ["a line of the foot " * 40] * 4)
    assert figure.get_figheight() > before
    (first, second), height = figure.axes, figure.get_figheight()
    # The axes stay as tall as they were, and above the foot.
    assert first.get_position().height * height == pytest.approx(style.AXES_HEIGHT)
    assert first.get_position().y0 * height > 4 * 3 * style.FOOT_LINE
    assert second.get_position().y0 == first.get_position().y0


def test_a_label_has_one_look_in_all_figures() -> None:
    looks = numbered(study(), [kernel(0)])
    only_log = [row for row in study() if row.method == "kerple_log"]
    (line, *_), (reach, *_) = (
        perplexity_figure(only_log, looks=looks).axes[0].get_lines(),
        reach_figure([kernel(0)], looks=looks).axes[0].get_lines(),
    )
    assert looks == {"alibi": 0, "kerple_log": 1, "learned": 2}
    assert line.get_color() == reach.get_color() == style.line_style(1)["color"]
    assert line.get_marker() == reach.get_marker() == "s"
    windowed = make("alibi", 1, 512, 20.0, options={"sliding_window_width": 512})
    assert numbered([windowed], study()) == {**looks, "alibi, window 512": 3}


def test_perplexity_figure_draws_the_means() -> None:
    axes, *others = perplexity_figure(study()).axes
    assert not others
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    alibi = axes.get_lines()[0]
    assert list(alibi.get_xdata()) == [512, 1024, 2048]
    told = figure_text(perplexity_figure(study()))
    assert "line: mean over 3 seeds; band: ± one standard deviation (n - 1) over them" in told
    assert "one seed: no band" in figure_text(
        perplexity_figure(row for row in study() if row.seed == 1)
    )
    assert list(alibi.get_ydata()) == pytest.approx([71.6 / 3, 67.8 / 3, 67.5 / 3])
    assert axes.get_lines()[-1].get_xdata()[0] == 512  # the training length
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["trained on 512", "alibi", "kerple_log", "learned (to 512)"]
    # At 2048 the deviations are -0.5, -0.1 and 0.6: std sqrt(0.31).
    band = axes.collections[0].get_paths()[0].vertices
    edges = sorted({round(y, 9) for x, y in band if x == 2048})
    assert edges == pytest.approx([22.5 - math.sqrt(0.31), 22.5 + math.sqrt(0.31)])


def test_far_apart_methods_get_a_close_up() -> None:
    far = [make("rotary", seed, 2048, 900.0) for seed in (1, 2, 3)]
    far += [make("rotary", seed, 512, 24.0) for seed in (1, 2, 3)]
    whole, close = perplexity_figure([*study(), *far]).axes
    assert whole.get_ylim()[1] > 800 and close.get_ylim()[1] < 40
    assert "rotary" in [text.get_text() for text in whole.texts]
    assert "rotary" not in [text.get_text() for text in close.texts]


def test_position_figure_averages_seeds_and_bins() -> None:
    def row(seed: int, losses: list[float]) -> Row:
        return Row(**fields(protocol="position", seed=seed, position_losses=losses))

    few = position_figure([row(1, [2.5, 1.5]), row(2, [2.7, 1.3])])
    line = few.axes[0].get_lines()[0]
    assert list(line.get_xdata()) == [256.0, 768.0]
    assert list(line.get_ydata()) == pytest.approx([2.6, 1.4])
    many = [2.0 + math.cos(2 * math.pi * i / 1024) for i in range(1024)]
    drawn = position_figure([row(1, many)]).axes[0].get_lines()[0]
    x, y = drawn.get_xdata(), drawn.get_ydata()
    assert 30 < len(x) <= 64 and list(x) == sorted(x) and x[0] == 1.0 and x[-1] < 1024
    assert y[0] == pytest.approx(3.0)
    with pytest.raises(RowError, match="no losses by position at length 2048"):
        position_figure([row(1, many)], eval_length=2048)
    with pytest.raises(RowError, match="no losses by position"):
        position_figure(study())
    with pytest.raises(RowError, match="different numbers of position bins"):
        position_figure([row(1, many), row(2, [2.5, 1.5])])


def test_kernel_figure_draws_every_head_of_one_step() -> None:
    early = kernel(0, step=1)
    weights = [kernel(h, method="kerple_weight", bias=None, weight=[0.5] * 64) for h in range(2)]
    with pytest.raises(RowError, match="step 1; books, trained on None, step 100"):
        kernel_figure([early, kernel(0)])
    figure = kernel_figure([kernel(0), kernel(1), *weights])
    first, second = (axes for axes in figure.axes if axes.get_title(loc="left"))
    assert first.get_title(loc="left") == "kerple_log, step 100"
    heads = [line for line in first.get_lines() if len(line.get_xdata()) == 64]
    drawn = sorted(tuple(line.get_ydata()) for line in heads)
    assert drawn == sorted(tuple(kernel(h).bias or ()) for h in (0, 1))
    dots = sorted(line.get_xdata()[0] for line in first.get_lines() if len(line.get_xdata()) == 1)
    assert dots == [4, 13]
    assert first.get_xscale() == "symlog" and second.get_ylabel() == "weight"
    with pytest.raises(RowError, match="several runs"):
        kernel_figure([kernel(0), kernel(0, seed=2)])
    with pytest.raises(RowError, match="no kernels"):
        kernel_figure([])


def test_files_are_reproducible(tmp_path: Path) -> None:
    for name, build in (
        ("perplexity", lambda: perplexity_figure(study())),
        ("kernels", lambda: kernel_figure([kernel(0), kernel(1)])),
    ):
        first = save(build(), tmp_path / "one" / name)
        second = save(build(), tmp_path / "two" / name)
        assert [path.name for path in first] == [f"{name}.svg", f"{name}.png"]
        for a, b in zip(first, second, strict=True):
            assert a.read_bytes() == b.read_bytes()
        assert b"<dc:date>" not in first[0].read_bytes()
        assert first[1].read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "one").iterdir())) == 4


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(RowError, match="every cell was refused or failed"):
        perplexity_figure([make("learned", 1, 1024, None)])
    with pytest.raises(RowError, match="differ in: split"):
        perplexity_figure([*study(), make("rotary", 1, 512, 20.0, split="test")])


def test_series_look_different_and_labels_keep_apart() -> None:
    looks = [line_style(index) for index in range(16)]
    assert len({(s["color"], s["marker"], str(s["linestyle"])) for s in looks}) == 16
    placed = spread([0.5, 0.51, 0.52, 0.9, 0.0], 0.1, 0.0, 1.0)
    assert placed[3:] == [0.9, 0.0] and placed[:3] == pytest.approx([0.41, 0.51, 0.61])
    low = spread([0.0, 0.0, 0.0], 0.1, 0.0, 1.0)
    assert sorted(low) == pytest.approx([0.0, 0.1, 0.2])
