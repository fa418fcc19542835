"""Charts of long curves for the report: a line a label, with the value under the pointer.

As in ``charts``: inline SVG that stands without JavaScript. Every trace carries its numbers
(``data-x``, ``data-y``, ``data-low``, ``data-high``), by which ``report.js`` shows values and moves the
lines when a filter changes. Curves with more points than the plot has columns keep the lowest and the
highest of each column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_patches.analysis.markup import Markup, element
from megatron_patches.analysis.svg import (
    KERNEL,
    LEGEND_PITCH,
    PERPLEXITY,
    Box,
    Scale,
    even_ticks,
    frame,
    label,
    look,
    number,
    polyline,
    scale,
    segment,
    svg_tags,
    tick_x,
    tick_y,
)

WIDE = replace(PERPLEXITY, height=340, bottom=290)
SMALL = replace(KERNEL, left=54)
MARGIN = 0.03  # of the range of values, above and below
MOST_POINTS = 2 * (WIDE.right - WIDE.left)  # of a curve in a wide chart
THINNED = (
    f"curves of more than {MOST_POINTS} points: the lowest and the highest of each column of pixels"
)


@dataclass(frozen=True)
class Trace:
    """One curve: ``ys`` at ascending ``xs``, with a band from ``lows`` to ``highs`` where it has one.

    ``index`` fixes colour and dashes on the whole page; ``control`` draws it pale, thin and dotted;
    ``steps`` as a staircase. ``tip`` is what is told of the whole curve.
    """

    label: str
    method: str
    index: int
    xs: Sequence[float]
    ys: Sequence[float]
    tip: str
    lows: Sequence[float] | None = None
    highs: Sequence[float] | None = None
    control: bool = False
    steps: bool = False


@dataclass(frozen=True)
class Axes:
    """What a chart says beside its curves. ``logarithmic`` is about x; y is always linear.

    ``marks`` are x values with a dashed line and a word; ``unit`` follows x in the hover text.
    """

    title: str
    x: str
    y: str
    unit: str
    logarithmic: bool = False
    marks: Sequence[tuple[float, str]] = ()
    zero: bool = False  # y = 0 is drawn and in range
    legend: bool = True
    small: bool = False


def thinned(trace: Trace, columns: int, position: list[float]) -> Trace:
    """The trace with at most two points for each of ``columns``: the lowest and the highest there.

    ``position`` holds, for each point, its place from 0 to 1 along the axis. The band takes in all that
    was left out.
    """
    if len(trace.xs) <= 2 * columns:
        return trace
    groups: dict[int, list[int]] = {}
    for i, place in enumerate(position):
        groups.setdefault(int(place * columns), []).append(i)
    kept, lows, highs = [], [], []
    for column in sorted(groups):
        own = groups[column]
        low = min(trace.lows[i] for i in own) if trace.lows else None
        high = max(trace.highs[i] for i in own) if trace.highs else None
        ends = {min(own, key=lambda i: trace.ys[i]), max(own, key=lambda i: trace.ys[i])}
        for i in sorted(ends):
            kept.append(i)
            lows.append(low)
            highs.append(high)
    return replace(
        trace,
        xs=[trace.xs[i] for i in kept],
        ys=[trace.ys[i] for i in kept],
        lows=[v for v in lows if v is not None] if trace.lows else None,
        highs=[v for v in highs if v is not None] if trace.highs else None,
    )


def line_chart(traces: Sequence[Trace], axes: Axes) -> Markup:
    """The chart of at least one trace."""
    box = SMALL if axes.small else WIDE
    along = math.log2 if axes.logarithmic else float
    values = [along(value) for trace in traces for value in trace.xs]
    values += [along(value) for value, _ in axes.marks]
    x = scale(min(values), max(values), box.left + 4, box.right - 4)
    width = box.right - box.left
    traces = [
        thinned(t, width, [(x(along(v)) - box.left) / (width + 1) for v in t.xs]) for t in traces
    ]
    heights = [v for t in traces for part in (t.ys, t.lows, t.highs) if part for v in part]
    heights += [0.0] if axes.zero else []
    room = MARGIN * (max(heights) - min(heights)) or 0.1 * abs(max(heights)) or 1.0
    low, high = min(heights) - room, max(heights) + room
    y = scale(low, high, box.bottom, box.top)
    shapes = [_trace(t, [x(along(v)) for v in t.xs], y) for t in traces]
    legend = [_key(t, place, box) for place, t in enumerate(_by_end(traces))] if axes.legend else []
    tall = max(box.height, box.top + LEGEND_PITCH * (len(legend) + 1))
    return element(
        "svg",
        frame(box, axes.x, axes.y),
        element("g", *(tick_y(box, y(v), f"{v:g}") for v in even_ticks(low, high)), class_="ticks"),
        *_ticks(box, axes, x, min(values), max(values)),
        *(_mark(box, x(along(value)), word) for value, word in axes.marks),
        element("g", *shapes, class_="traces"),
        *legend,
        element("circle", class_="dot", r="4", cx="0", cy="0", visibility="hidden"),
        **svg_tags(replace(box, height=tall), axes.title),
        class_="curves",
        data_top=str(box.top),
        data_bottom=str(box.bottom),
        data_left=str(box.left),
        data_right=str(box.right),
        data_unit=axes.unit,
        data_scale_low=repr(low),
        data_scale_high=repr(high),
        data_zero="" if axes.zero else None,
    )


def _trace(trace: Trace, at: Sequence[float], y: Scale) -> Markup:
    pairs = _staircase(list(zip(at, (y(v) for v in trace.ys), strict=True)), trace.steps)
    parts = [element("title", trace.tip)]
    banded = trace.lows is not None and trace.highs is not None
    if trace.lows is not None and trace.highs is not None:
        upper = [(px, y(v)) for px, v in zip(at, trace.highs, strict=True)]
        lower = [(px, y(v)) for px, v in zip(at, trace.lows, strict=True)]
        band = _staircase(upper, trace.steps) + _staircase(lower, trace.steps)[::-1]
        parts.append(element("polygon", points=polyline(band)))
    parts.append(element("polyline", points=polyline(pairs)))
    return element(
        "g",
        *parts,
        class_=f"trace {look(trace.index)}" + (" control" if trace.control else ""),
        tabindex="0",
        data_label=trace.label,
        data_method=trace.method,
        data_variant=trace.label,
        data_x=_numbers(trace.xs),
        data_y=_numbers(trace.ys),
        data_px=" ".join(number(value) for value in at),
        data_low=_numbers(trace.lows) if banded else None,
        data_high=_numbers(trace.highs) if banded else None,
        data_steps="" if trace.steps else None,
    )


def _staircase(pairs: list[tuple[float, float]], steps: bool) -> list[tuple[float, float]]:
    """The points, each held until the next one where the curve is a staircase."""
    if not steps:
        return pairs
    held = [(b[0], a[1]) for a, b in zip(pairs, pairs[1:], strict=False)]
    mixed = [point for both in zip(pairs, held, strict=False) for point in both]
    return [*mixed, pairs[-1]]


def _numbers(values: Sequence[float] | None) -> str:
    return " ".join(
        f"{value:.5g}" if value != int(value) else str(int(value)) for value in values or ()
    )


def _by_end(traces: Sequence[Trace]) -> list[Trace]:
    return sorted(traces, key=lambda trace: -trace.ys[-1])


def _key(trace: Trace, place: int, box: Box) -> Markup:
    height, start = box.top + 12 + LEGEND_PITCH * place, box.right + 16
    return element(
        "g",
        segment(start, height, start + 30, height),
        label(start + 36, height + 4, trace.label, class_="start"),
        class_=f"key {look(trace.index)}" + (" control" if trace.control else ""),
        data_method=trace.method,
        data_variant=trace.label,
    )


def _mark(box: Box, at: float, word: str) -> Markup:
    line = segment(at, box.top, at, box.bottom, class_="threshold")
    return element("g", line, label(at, box.top - 8, word, class_="small"))


def _ticks(box: Box, axes: Axes, x: Scale, low: float, high: float) -> list[Markup]:
    if low == high:
        return [tick_x(box, x(low), short(2.0**low if axes.logarithmic else low))]
    if not axes.logarithmic:
        return [tick_x(box, x(value), short(value)) for value in even_ticks(low, high)]
    powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
    every = math.ceil(len(powers) / 9)
    return [
        tick_x(box, x(float(power)), f"{2.0**power:g}") for power in powers if not power % every
    ]


def short(value: float) -> str:
    """3M for three million, 500k, 20."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
