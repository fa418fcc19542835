"""Loss by position with windowed controls: lines, differences, figure."""

from __future__ import annotations

import math

import pytest
from analysis_rows import fields

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.figures_position import position_figure
from megatron_patches.analysis.positions import binning, position_lines
from megatron_patches.analysis.rows import Row, RowError
from megatron_patches.analysis.style import CONTEXT, GREY
from megatron_patches.analysis.tables import extrapolation_table

WINDOW = {"sliding_window_width": 512}


def row(losses: list[float], seed: int = 1, **changes: object) -> Row:
    loss = math.fsum(losses) / len(losses)
    scores = {"loss": loss, "perplexity": math.exp(loss), "window_losses": [loss, loss]}
    more = {
        "protocol": "position",
        "seed": seed,
        "position_losses": losses,
        "config_sha": f"s{seed}",
    }
    return Row(**fields(**{**more, **scores, **changes}))


def test_labels_name_the_window() -> None:
    assert series_label(row([2.0], options=WINDOW)) == "alibi, window 512"
    both = row([2.0], options={**WINDOW, "position_sharing": "layer"})
    assert series_label(both) == "alibi (position_sharing=layer), window 512"
    assert series_label(both, window=False) == "alibi (position_sharing=layer)"
    assert series_label(row([2.0], options={"window": 512})) == "alibi (window=512)"


def test_levels_of_a_study_name_its_variants() -> None:
    levels = {"variant": {"decay": "all", "sharing": "layered"}, "position_sharing": "layer"}
    assert series_label(row([2.0], options=levels)) == "alibi, decay all, sharing layered"
    windowed = row([2.0], options={**levels, **WINDOW, "attention_eps": 0.5})
    expected = "alibi, decay all, sharing layered (attention_eps=0.5), window 512"
    assert series_label(windowed) == expected
    odd = row([2.0], options={"variant": "all", "position_init": "x"})
    assert series_label(odd) == "alibi (position_init=x, variant=all)"


def test_a_control_is_compared_with_the_same_weights() -> None:
    rows = [
        *(row([3.0, 2.0]), row([3.2, 2.4], seed=2)),
        *(row([3.0, 2.5], options=WINDOW), row([3.2, 2.6], seed=2, options=WINDOW)),
        row([9.0, 9.0], seed=3, options=WINDOW),  # no partner
        row([4.0, 4.5], method="rotary"),
    ]
    lines = {line.label: line for line in position_lines(rows)}
    assert list(lines) == ["alibi", "alibi, window 512", "rotary"]
    control = lines["alibi, window 512"]
    assert (control.base, control.window, control.seeds) == ("alibi", 512, 3)
    assert control.positions == [256.0, 768.0]
    assert control.surplus == pytest.approx([0.0, 0.35])  # (0.5 + 0.2) / 2
    assert lines["alibi"].surplus is None and lines["rotary"].surplus is None
    assert lines["alibi"].losses == pytest.approx([3.1, 2.2])


def test_other_weights_are_no_control() -> None:
    trained = row([3.0, 2.5], options=WINDOW, config_sha="trained with the window")
    lines = position_lines([row([3.0, 2.0]), trained])
    assert [line.surplus for line in lines] == [None, None]
    assert len(position_figure([row([3.0, 2.0]), trained]).axes) == 1


def test_figure_has_grey_dashed_controls_and_a_difference() -> None:
    rows = [row([3.0, 2.0]), row([3.0, 2.5], options=WINDOW)]
    loss, difference = position_figure(rows).axes
    whole, control = loss.get_lines()[:2]
    assert control.get_color() == GREY and control.get_linestyle() == "--"
    assert whole.get_color() != GREY and whole.get_marker() == control.get_marker()
    assert list(difference.get_lines()[1].get_ydata()) == pytest.approx([0.0, 0.5])
    assert "alibi, window 512" in [text.get_text() for text in loss.texts]
    assert len(position_figure(rows, methods=["alibi"]).axes) == 2


def test_methods_far_apart_get_a_close_up() -> None:
    rows = [row([3.0, 2.0]), row([11.0, 12.0], method="kerple_gauss3")]
    whole, close = position_figure(rows).axes
    assert whole.get_ylim()[1] > 11 and close.get_ylim()[1] < 3
    assert [t.get_text() for t in close.texts if "512" not in t.get_text()] == ["alibi"]
    # Leader lines start at the ends of their curves, not where the axes stood before.
    for axes in (whole, close):
        for text in axes.texts:
            if text.arrow_patch is not None:
                x, y = axes.transData.transform(text.xy) if text.xycoords == "data" else (
                    axes.transAxes.transform(text.xy))  # fmt: skip
                box = axes.get_window_extent()
                assert box.x0 <= x <= box.x1 + 1 and box.y0 - 1 <= y <= box.y1 + 1


def test_one_exploding_method_does_not_set_the_scale_of_differences() -> None:
    rows = [row([3.0, 2.0 + k / 100], method=f"m{k}") for k in range(3)]
    rows += [row([3.0, 2.03 + k / 100], method=f"m{k}", options=WINDOW) for k in range(3)]
    rows += [row([3.0, 2.9], method="rotary"), row([3.0, 2.1], method="rotary", options=WINDOW)]
    loss, whole, close = position_figure(rows).axes
    assert whole.get_ylim()[0] < -0.7 and loss.get_ylim()[1] > 2.9
    assert close.get_title(loc="left") == "The same, near 0"
    low, high = close.get_ylim()
    assert -0.01 < low < 0 and 0.03 < high < 0.04
    assert "rotary, window 512" not in [text.get_text() for text in close.texts]


def test_what_has_no_losses_by_position_is_named() -> None:
    lost = {"loss": None, "perplexity": None, "tokens": 0, "windows": 0, "window_losses": []}
    lost |= {"status": "failed", "message": "out of memory", "position_losses": None}
    gone = [Row(**fields(protocol="position", method="rotary", seed=s, **lost)) for s in (1, 2)]
    rows = [row([3.0, 2.0]), row([3.0, 2.0], seed=2), row([3.1, 2.1], method="none"), *gone]
    told = position_figure(rows).texts[-1].get_text().replace("\n", " ")
    assert "not drawn: rotary (failed: out of memory)" in told
    assert "fewer seeds: none: 1 of 2 seeds" in told
    assert "a point: the mean over one of 2 bins of 512 positions" in told
    assert "mean over 1 or 2 seeds" in told


def test_rows_of_the_engine_are_drawn_as_they_are() -> None:
    losses = [2 + k / 64 for k in range(64)]
    (line,) = position_lines([row(losses)])
    assert line.losses == losses
    assert binning([row(losses)]) == "a point: the mean over one of 64 bins of 16 positions"
    many = binning([row([2.0] * 1024)])
    assert many.endswith("1024 bins of 1 positions, averaged in 64 bins of equal ratio")


def test_many_methods_have_a_panel_each() -> None:
    rows = [row([3.0, 2.0 + k / 100], method=f"m{k}") for k in range(6)]
    assert len(position_figure(rows).axes) == 1
    rows += [row([3.0, 2.02 + k / 100], method=f"m{k}", options=WINDOW) for k in range(6)]
    rows.append(row([9.0, 8.0], method="rotary"))
    figure = position_figure(rows)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    expected = [f"m{k}" for k in range(6)] + ["rotary"]
    assert titles == expected + [f"m{k}: windowed minus whole" for k in range(6)]
    first, rotary = figure.axes[0], figure.axes[6]
    assert first.get_ylim() == rotary.get_ylim() and first.get_ylim()[1] < 3.5
    assert [text.get_text() for text in rotary.texts] == ["rotary ends at 8"]
    greys = [line for line in first.get_lines() if line.get_color() == CONTEXT]
    assert len(greys) == 7
    control = [line for line in first.get_lines() if line.get_color() == GREY]
    assert [list(line.get_ydata()) for line in control][0] == [3.0, 2.02]
    assert list(figure.axes[7].get_lines()[1].get_ydata()) == pytest.approx([0.0, 0.02])


def test_controls_are_lines_of_tables_too_and_protocols_stay_apart() -> None:
    table = extrapolation_table([row([3.0, 2.0]), row([3.0, 2.5], options=WINDOW)])
    assert [label for label, _ in table.rows] == ["alibi", "alibi, window 512"]
    mixed = [row([3.0, 2.0]), row([3.0, 2.0], protocol="nonoverlap", method="rotary")]
    for build in (extrapolation_table, position_figure, position_lines):
        with pytest.raises(RowError, match=r"protocol \(nonoverlap, position\)"):
            build(mixed)
