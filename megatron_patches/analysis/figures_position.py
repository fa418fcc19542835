"""The figure of loss by position, with the windowed control where there is one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_patches.analysis.aggregate import comparable_rows, only, provenance
from megatron_patches.analysis.figures import CLOSE_UP_RATIO, mark_training
from megatron_patches.analysis.looks import Looks, numbered
from megatron_patches.analysis.positions import PositionLine, binning, position_lines
from megatron_patches.analysis.rows import Row
from megatron_patches.analysis.style import (
    CONTEXT,
    GREY,
    MOST_TOGETHER,
    STYLE,
    footer,
    grid,
    label_ends,
    line_style,
    panels,
    shrink,
)
from megatron_patches.analysis.undrawn import position_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 5  # panels side by side where each method has one
CLOSE_UP = 0.8  # nats above the lowest loss that the panel near the best shows
CONTROL = "dashed grey: the same weights, each token attending to the width of the window only"
SURPLUS = "Windowed minus whole: above 0, the far text helps"
Limits = tuple[float, float]


def position_figure(
    rows: Iterable[Row],
    *,
    eval_length: int | None = None,
    methods: Sequence[str] | None = None,
    looks: Looks | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """Mean loss (nats per token) against the position in the window, averaged over seeds.

    ``eval_length`` chooses the window (the longest with data if None). Controls (the same weights
    with a sliding attention window) are dashed grey lines with their method's marker, and panels of
    their own show how much higher their loss is. Where methods lie far apart, further panels show
    those near the best. More than MOST_TOGETHER methods have a panel each, near the best, with the
    others in pale grey. ``notes`` are further lines of the foot. RowError: see
    ``positions.position_lines``.
    """
    import matplotlib

    rows = comparable_rows(only(rows, methods))
    lines = position_lines(rows, eval_length, methods)
    looks = looks or numbered(rows)
    length = eval_length or max(row.eval_length for row in rows if row.position_losses)
    title = f"Loss by position, {rows[0].dataset}, window of {length} tokens"
    several = len({line.base for line in lines}) > MOST_TOGETHER
    with matplotlib.rc_context(STYLE):
        draw = _apart if several else _together
        figure, every = draw(lines, looks, title)
        for panel in every:
            mark_training(panel, rows[0].train_length, word=not several)
        own = [row for row in rows if row.eval_length == length]
        foot = [*provenance(own), *_said(lines, own), *position_notes(own, length)]
        if several:
            foot.append(f"dashed upright line: trained on {rows[0].train_length} tokens")
        footer(figure, [*foot, *notes])
    return figure


def _said(lines: Sequence[PositionLine], rows: Sequence[Row]) -> list[str]:
    counts = sorted({line.seeds for line in lines})
    seeds = " or ".join(map(str, counts)) + (" seed" if counts == [1] else " seeds")
    parts = [f"mean over {seeds}", binning(rows)]
    return ["; ".join(parts + ([CONTROL] if any(line.window for line in lines) else []))]


def _together(lines: Sequence[PositionLine], looks: Looks, title: str) -> tuple[Figure, list[Axes]]:
    surplus = [line for line in lines if line.surplus is not None]
    near, near_surplus = near_best(lines), near_zero(surplus)
    count = 1 + (near is not None) + bool(surplus) + (near_surplus is not None)
    figure, every = panels(count, [line.label for line in lines])
    places = iter(every)
    for limits, words in ((None, title), (near, "The same, near the best")):
        if limits is not None or words == title:
            axes = next(places)
            _draw(axes, lines, looks, limits)
            axes.set_title(words, pad=16)
    for limits, words in ((None, SURPLUS), (near_surplus, "The same, near 0")):
        if surplus and (limits is not None or words == SURPLUS):
            axes = next(places)
            _draw_surplus(axes, surplus, looks, limits)
            axes.set_title(words, pad=16)
    return figure, every


def _apart(lines: Sequence[PositionLine], looks: Looks, title: str) -> tuple[Figure, list[Axes]]:
    """A panel for each method, then one for the difference to each method's controls."""
    whole = [line for line in lines if line.surplus is None and line.label == line.base]
    bases = list(dict.fromkeys(line.base for line in lines))
    surplus = [line for line in lines if line.surplus is not None]
    compared = [base for base in bases if any(line.base == base for line in surplus)]
    gap = -len(bases) % COLUMNS if compared else 0  # the differences start in a row of their own
    figure, every = grid(len(bases) + gap + len(compared), COLUMNS, (2.5, 2.0))
    for axes in every[len(bases) : len(bases) + gap]:
        axes.remove()
    every = every[: len(bases)] + every[len(bases) + gap :]
    low = min(value for line in lines for value in line.losses)
    limits = near_best(lines) or (low - 0.03, max(max(line.losses) for line in lines) + 0.03)
    for axes, base in zip(every, bases, strict=False):
        for other in whole:
            axes.plot(other.positions, other.losses, color=CONTEXT, linewidth=0.7)
        own = [line for line in lines if line.base == base]
        _draw(axes, own, looks, limits, labels=False)
        axes.set_title(base, fontsize=8)
        shrink(axes, "position (tokens)", "loss (nats per token)")
        _say_beyond(axes, [(line.label, line.losses[-1]) for line in own], limits)
    peaks = [value for line in surplus for value in line.surplus or ()]
    around = near_zero(surplus) or _padded([0.0, *peaks])
    for axes, base in zip(every[len(bases) :], compared, strict=True):
        own = [line for line in surplus if line.base == base]
        _draw_surplus(axes, own, looks, around, labels=False)
        axes.set_title(f"{base}: windowed minus whole", fontsize=7)
        shrink(axes, "position (tokens)", "difference (nats)")
        _say_beyond(axes, [(line.label, (line.surplus or [0])[-1]) for line in own], around)
    below = f"; below: {SURPLUS[0].lower()}{SURPLUS[1:]}" if surplus else ""
    figure.suptitle(f"{title}, near the best{below}", fontsize=10, x=0.01, ha="left")
    return figure, every


def near_best(lines: Sequence[PositionLine]) -> Limits | None:
    """The limits of a panel near the lowest loss; None where all lines end near it."""
    low = min(value for line in lines for value in line.losses)
    if max(line.losses[-1] for line in lines) <= low + math.log(CLOSE_UP_RATIO):
        return None
    return low - 0.03, low + CLOSE_UP


def near_zero(lines: Sequence[PositionLine]) -> Limits | None:
    """The limits of a panel of small differences; None where no line is far beyond the others."""
    if not lines:
        return None
    peaks = [max(abs(value) for value in line.surplus or [0.0]) for line in lines]
    limit = CLOSE_UP_RATIO * statistics.median_low(peaks)
    near = [line for line, peak in zip(lines, peaks, strict=True) if peak <= limit]
    if len(near) == len(lines):
        return None
    return _padded([0.0, *(value for line in near for value in line.surplus or ())])


def _padded(values: Sequence[float]) -> Limits:
    room = 0.06 * (max(values) - min(values)) or 0.01
    return min(values) - room, max(values) + room


def _say_beyond(axes: Axes, ends: Sequence[tuple[str, float]], limits: Limits) -> None:
    """Which lines end outside the panel, in it."""
    beyond = [(label, value) for label, value in ends if not limits[0] <= value <= limits[1]]
    text = "\n".join(f"{label} ends at {value:.3g}" for label, value in beyond)
    if text:
        axes.text(*(0.97, 0.95, text), transform=axes.transAxes, fontsize=6.5, ha="right", va="top")


def _style(line: PositionLine, looks: Looks, control: bool) -> dict[str, Any]:
    style = {**line_style(looks[line.base]), "markersize": 3.5, "linewidth": 1.2}
    if control:
        style |= {"color": GREY, "linestyle": (0, (4, 2)), "linewidth": 0.9, "zorder": 2.5}
    return style


def _plot(axes: Axes, line: PositionLine, values: Sequence[float], style: dict[str, Any]) -> None:
    # Markers of lines that lie on each other stand at different places.
    start = sum(map(ord, line.base)) % 6
    axes.plot(line.positions, values, **style, markevery=(start, 6))


def _draw(
    axes: Axes,
    lines: Sequence[PositionLine],
    looks: Looks,
    limits: Limits | None,
    *,
    labels: bool = True,
) -> None:
    ends = []
    for line in lines:
        style, last = _style(line, looks, line.window is not None), line.losses[-1]
        _plot(axes, line, line.losses, style)
        if limits is None or limits[0] <= last <= limits[1]:
            ends.append((line.label, line.positions[-1], last, style["color"]))
    _frame(axes, limits, "loss (nats per token)")
    if labels:
        label_ends(axes, ends)


def _draw_surplus(
    axes: Axes,
    lines: Sequence[PositionLine],
    looks: Looks,
    limits: Limits | None,
    *,
    labels: bool = True,
) -> None:
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    ends = []
    for line in lines:
        values, style = line.surplus or [], _style(line, looks, False)
        _plot(axes, line, values, style)
        if limits is None or limits[0] <= values[-1] <= limits[1]:
            ends.append((line.label, line.positions[-1], values[-1], style["color"]))
    for width in sorted({line.window for line in lines if isinstance(line.window, int)}):
        axes.axvline(width, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    _frame(axes, limits, "difference in loss (nats per token)")
    if labels:
        label_ends(axes, ends)


def _frame(axes: Axes, limits: Limits | None, name: str) -> None:
    axes.set_xscale("log", base=2)
    if limits is not None:
        axes.set_ylim(*limits)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel(name)
