"""The figure of loss by position, with the windowed control where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_patches.analysis.aggregate import comparable_rows, only, provenance, series_label
from megatron_patches.analysis.figures import CLOSE_UP_RATIO, footer, mark_training
from megatron_patches.analysis.positions import PositionLine, position_lines
from megatron_patches.analysis.rows import Row
from megatron_patches.analysis.style import GREY, STYLE, label_ends, line_style, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CLOSE_UP = 0.8  # nats above the lowest loss that the panel near the best shows


def position_figure(
    rows: Iterable[Row], *, eval_length: int | None = None, methods: Sequence[str] | None = None
) -> Figure:
    """Mean loss (nats per token) against the position in the window, averaged over seeds.

    ``eval_length`` chooses the window (the longest with data if None). Controls (the same weights
    with a sliding attention window) are dashed grey lines with their method's marker, and a panel of
    their own shows how much higher their loss is. Where methods lie far apart, another one shows
    those near the best. RowError: see ``positions.position_lines``.
    """
    import matplotlib

    rows = comparable_rows(only(rows, methods))
    lines = position_lines(rows, eval_length, methods)
    # Numbered over all rows, so that a method looks the same in every figure made of them.
    bases = list(dict.fromkeys(sorted(series_label(row, window=False) for row in rows)))
    length = eval_length or max(row.eval_length for row in rows if row.position_losses)
    surplus = [line for line in lines if line.surplus is not None]
    values = [value for line in lines for value in line.losses]
    close_up = max(line.losses[-1] for line in lines) > min(values) + math.log(CLOSE_UP_RATIO)
    with matplotlib.rc_context(STYLE):
        labels = [line.label for line in lines]
        figure, axes = panels(1 + close_up + bool(surplus), labels)
        _draw(axes[0], lines, bases, None)
        axes[0].set_title(f"Loss by position, {rows[0].dataset}, window of {length} tokens", pad=16)
        if close_up:
            _draw(axes[1], lines, bases, (min(values) - 0.03, min(values) + CLOSE_UP))
            axes[1].set_title("The same, near the best", pad=16)
        if surplus:
            _draw_surplus(axes[-1], surplus, bases)
        for panel in axes:
            mark_training(panel, rows[0].train_length)
        footer(figure, provenance(row for row in rows if row.eval_length == length))
    return figure


def _style(line: PositionLine, bases: Sequence[str]) -> dict[str, Any]:
    style = {**line_style(bases.index(line.base)), "markersize": 3.5, "linewidth": 1.2}
    if line.window is not None:
        style |= {"color": GREY, "linestyle": (0, (4, 2)), "linewidth": 0.9, "zorder": 2.5}
    return style


def _draw(
    axes: Axes,
    lines: Sequence[PositionLine],
    bases: Sequence[str],
    limits: tuple[float, float] | None,
) -> None:
    axes.set_xscale("log", base=2)
    ends = []
    for line in lines:
        style, last = _style(line, bases), line.losses[-1]
        start = bases.index(line.base) % 6
        axes.plot(line.positions, line.losses, **style, markevery=(start, 6))
        if limits is None or limits[0] <= last <= limits[1]:
            ends.append((line.label, line.positions[-1], last, style["color"]))
    if limits is not None:
        axes.set_ylim(*limits)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("loss (nats per token)")
    label_ends(axes, ends)


def _draw_surplus(axes: Axes, lines: Sequence[PositionLine], bases: Sequence[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    ends = []
    for line in lines:
        values = line.surplus or []
        style = {**line_style(bases.index(line.base)), "markersize": 3.5, "linewidth": 1.2}
        axes.plot(line.positions, values, **style, markevery=(bases.index(line.base) % 6, 6))
        ends.append((line.label, line.positions[-1], values[-1], style["color"]))
    for width in sorted({line.window for line in lines if line.window}):
        axes.axvline(width, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("difference in loss (nats per token)")
    axes.set_title("Windowed minus whole text: above 0, it helps", pad=16)
    label_ends(axes, ends)
