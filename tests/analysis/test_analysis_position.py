"""Loss by position with windowed controls: lines, differences, figure."""

from __future__ import annotations

import math

import pytest
from analysis_rows import fields

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.figures_position import position_figure
from megatron_patches.analysis.positions import position_lines
from megatron_patches.analysis.rows import Row, RowError
from megatron_patches.analysis.style import GREY
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


def test_controls_are_lines_of_tables_too_and_protocols_stay_apart() -> None:
    table = extrapolation_table([row([3.0, 2.0]), row([3.0, 2.5], options=WINDOW)])
    assert [label for label, _ in table.rows] == ["alibi", "alibi, window 512"]
    mixed = [row([3.0, 2.0]), row([3.0, 2.0], protocol="nonoverlap", method="rotary")]
    for build in (extrapolation_table, position_figure, position_lines):
        with pytest.raises(RowError, match=r"protocol \(nonoverlap, position\)"):
            build(mixed)
