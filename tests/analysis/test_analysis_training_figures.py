"""Figures of training: curves as logged, panels near the best, parameters, what the foot says."""

from __future__ import annotations

import pytest
from analysis_rows import training

from megatron_patches.analysis.figures_training import parameters_figure, training_figure
from megatron_patches.analysis.training_rows import RowError


def test_figures_draw_what_was_logged() -> None:
    rows = [training(m, s) for m in ("alibi", "rotary") for s in (1, 2)]
    whole, end, held_out = training_figure(rows).axes
    line = whole.get_lines()[0]
    assert list(line.get_xdata()) == [2048 * step for step in range(10, 101, 10)]
    assert list(line.get_ydata()) == pytest.approx([5 - step / 50 for step in range(10, 101, 10)])
    assert end.get_xlim()[0] == pytest.approx(0.7 * 204_800)
    assert list(held_out.get_lines()[1].get_ydata()) == [4.2, 3.3]
    styles = [(ln.get_color(), ln.get_linestyle(), ln.get_marker()) for ln in whole.get_lines()]
    assert len(set(styles)) == 2
    panels = parameters_figure(rows).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["alibi: bias_p", "rotary: bias_p"]
    assert list(panels[0].get_lines()[-1].get_ydata())[0] == pytest.approx(1.1)
    no_position = [training("rotary", 1, position={})]
    with pytest.raises(RowError, match="no position parameters"):
        parameters_figure(no_position)
    failed = training("alibi", 1, status="failed", message="out of memory")
    with pytest.raises(RowError, match="no run was completed"):
        training_figure([failed])


def test_the_end_takes_the_range_of_the_end() -> None:
    rows = [training(m, 1, lm_loss=[5 + k - s / 50 for s in range(10, 101, 10)])
            for k, m in enumerate(("alibi", "rotary"))]  # fmt: skip
    whole, end, _ = training_figure(rows).axes
    # From step 70 on: 3.6 to 3 and 4.6 to 4, and 0.04 of that range on both sides.
    assert end.get_ylim() == pytest.approx((3 - 0.064, 4.6 + 0.064))
    assert whole.get_ylim()[1] > 5.7


def test_a_diverged_run_has_no_say_in_the_panels_near_the_best() -> None:
    bad = training("rotary", 1, lm_loss=[5.0, 4.0] + [90.0] * 8, validation_loss=[20.0, 90.0])
    rows = [training(m, s) for m in ("alibi", "none") for s in (1, 2)]
    figure = training_figure([*rows, bad])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        *("Training loss as logged, books", "The same, near the best"),
        *("The same, its last 30%, near the best", "Validation loss, near the best"),
    ]
    whole, *near = figure.axes
    assert whole.get_ylim()[1] > 85 and all(axes.get_ylim()[1] < 5.2 for axes in near)
    for axes, there in zip(figure.axes, (True, False, False, False), strict=True):
        assert ("rotary" in [text.get_text() for text in axes.texts]) == there
    assert len(training_figure(rows).axes) == 3


def test_figures_name_failed_runs_and_say_what_bands_are() -> None:
    rows = [training("alibi", 1), training("alibi", 2), training("rotary", 1)]
    rows.append(training("none", 1, status="failed", message="loss is not finite", step=100))
    for figure in (training_figure(rows), parameters_figure(rows)):
        told = figure.texts[-1].get_text().replace("\n", " ")
        assert "not drawn: none, seed 1 (failed after 100 steps: loss is not finite)" in told
        assert "fewer seeds: rotary: 1 of 2 seeds" in told and "band: from the lowest" in told
    alone = training_figure([training("alibi", 1)]).texts[-1].get_text()
    assert "one seed: no band" in alone


def test_parameters_show_each_seed_thin_below_the_mean() -> None:
    kinds = training("alibi", 1).position["bias_p"]
    moved = {kind: [v + 1 if kind != "std" else v for v in kinds[kind]] for kind in kinds}
    rows = [training("alibi", 1), training("alibi", 2, position={"bias_p": moved})]
    (axes,) = parameters_figure(rows).axes
    *thin, thick = axes.get_lines()
    assert [list(line.get_ydata()) for line in thin] == [kinds["mean"], moved["mean"]]
    assert list(thick.get_ydata()) == pytest.approx([v + 0.5 for v in kinds["mean"]])
    assert all(line.get_linewidth() < thick.get_linewidth() for line in thin)
    edges = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (edges.min(), edges.max()) == pytest.approx((min(kinds["min"]), max(moved["max"])))
