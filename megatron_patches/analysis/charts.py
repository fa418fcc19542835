"""Charts of the report as inline SVG: shapes with titles to hover, styled by the page's CSS.

They stand without JavaScript. ``report.js`` only moves what is there when a filter changes, by the
numbers that each point carries (``data-value``, ``data-low``, ``data-high``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_patches.analysis.figures_kernels import BIAS, Panel
from megatron_patches.analysis.kernels import THRESHOLD, farthest, reach
from megatron_patches.analysis.layout import format_number
from megatron_patches.analysis.markup import Markup, element
from megatron_patches.analysis.rows import KernelRow
from megatron_patches.analysis.svg import (
    COLOURS,
    KERNEL,
    LEGEND_PITCH,
    PERPLEXITY,
    Scale,
    even_ticks,
    frame,
    label,
    look,
    number,
    plain,
    polyline,
    scale,
    segment,
    svg_tags,
    tick_x,
    tick_y,
    ticks,
)


@dataclass(frozen=True)
class Point:
    """Mean over seeds at one length in tokens, with the ends of its band.

    ``stretch`` counts up where lengths between this point and the one before have no result: a line
    must not bridge them.
    """

    length: int
    value: float
    low: float
    high: float
    tip: str
    stretch: int = 0


@dataclass(frozen=True)
class Line:
    """One label of a chart; ``index`` fixes its colour and dashes on the whole page."""

    label: str
    method: str
    index: int
    points: Sequence[Point]

    @property
    def style(self) -> str:
        """The classes of colour and dashes."""
        return look(self.index)


def perplexity_chart(lines: Sequence[Line], train_length: int) -> Markup:
    """Perplexity against evaluation length, both logarithmic; a legend right of the plot."""
    box = PERPLEXITY
    lengths = sorted({point.length for line in lines for point in line.points})
    low = min(point.low for line in lines for point in line.points)
    high = max(point.high for line in lines for point in line.points)
    low, high = low / 1.03, high * 1.03
    ends = (math.log2(min(*lengths, train_length)), math.log2(max(*lengths, train_length)))
    x = scale(*ends, box.left + 14, box.right - 14)
    y = scale(math.log(low), math.log(high), box.bottom, box.top)
    marks = [tick_x(box, x(math.log2(n)), str(n), data_length=str(n)) for n in lengths]
    rows = [tick_y(box, y(math.log(value)), plain(value)) for value in ticks(low, high)]
    trained = x(math.log2(train_length))
    room = max(box.height, box.top + LEGEND_PITCH * (len(lines) + 1))
    return element(
        "svg",
        frame(box, "evaluation length (tokens)", "perplexity"),
        element("g", *rows, class_="ticks"),
        *marks,
        segment(trained, box.top, trained, box.bottom, class_="threshold"),
        label(trained, box.top - 8, f"trained on {train_length}", class_="small"),
        *(_perplexity_line(part, x, y) for line in lines for part in _stretches(line)),
        *(_legend(line, place) for place, line in enumerate(_by_last_value(lines))),
        **svg_tags(replace(box, height=room), "Perplexity against evaluation length"),
        class_="perplexity",
        data_top=str(box.top),
        data_bottom=str(box.bottom),
        data_left=str(box.left),
        data_right=str(box.right),
    )


def _by_last_value(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: -line.points[-1].value)


def _stretches(line: Line) -> list[Line]:
    """The line in parts, one after each gap."""
    found: dict[int, list[Point]] = {}
    for point in line.points:
        found.setdefault(point.stretch, []).append(point)
    return [replace(line, points=points) for points in found.values()]


def _perplexity_line(line: Line, x: Scale, y: Scale) -> Markup:
    places = [(x(math.log2(point.length)), point) for point in line.points]
    upper = [(px, y(math.log(point.high))) for px, point in places]
    lower = [(px, y(math.log(point.low))) for px, point in reversed(places)]
    dots = [
        element(
            "circle",
            element("title", point.tip),
            cx=number(px),
            cy=number(y(math.log(point.value))),
            r="4",
            tabindex="0",
            data_length=str(point.length),
            data_value=repr(point.value),
            data_low=repr(point.low),
            data_high=repr(point.high),
        )
        for px, point in places
    ]
    middle = [(px, y(math.log(point.value))) for px, point in places]
    return element(
        "g",
        element("polygon", points=polyline([*upper, *lower])),
        element("polyline", points=polyline(middle)),
        *dots,
        class_=f"line {line.style}",
        data_method=line.method,
        data_variant=line.label,
    )


def _legend(line: Line, place: int) -> Markup:
    height, start = PERPLEXITY.top + 12 + LEGEND_PITCH * place, PERPLEXITY.right + 16
    return element(
        "g",
        segment(start, height, start + 30, height),
        label(start + 36, height + 4, line.label, class_="start"),
        class_=f"key {line.style}",
        data_method=line.method,
        data_variant=line.label,
    )


def kernel_chart(panel: Panel, index: int) -> Markup:
    """One part of the kernel of each head against distance; paler heads spread attention farther."""
    box, additive = KERNEL, panel.part == BIAS
    low, high = panel.limits
    last = max(row.distances[-1] for row in panel.heads)
    x = scale(0.0, math.log2(1 + max(1, last)), box.left, box.right)
    y = scale(low, high, box.bottom, box.top)
    marked = additive and low < THRESHOLD
    shapes = []
    for place, (row, values) in enumerate(zip(panel.heads, panel.curves, strict=True)):
        opacity = 1 - 0.7 * place / max(1, len(panel.heads) - 1)
        line = _within(row.distances, values, (low, high), x, y)
        dot = (x, y(THRESHOLD)) if marked else None
        shapes.append(_head(row, line, additive, dot, opacity))
    every = [d for d in (1, 10, 100, 1000, 10_000, 100_000) if d <= last]
    marks = [tick_x(box, x(math.log2(1 + distance)), str(distance)) for distance in every]
    rows = [tick_y(box, y(value), f"{value:g}") for value in even_ticks(low, high)]
    limit = y(THRESHOLD)
    return element(
        "svg",
        frame(box, "distance (tokens)", panel.name),
        *(*rows, *marks),
        segment(box.left, limit, box.right, limit, class_="threshold") if marked else Markup(""),
        element("g", *shapes, class_=f"heads c{index % COLOURS}"),
        **svg_tags(box, panel.title),
    )


def _within(
    distances: Sequence[int],
    values: Sequence[float],
    limits: tuple[float, float],
    x: Scale,
    y: Scale,
) -> str:
    shown = []
    for distance, value in zip(distances, values, strict=True):
        shown.append((x(math.log2(1 + distance)), y(min(max(value, limits[0]), limits[1]))))
        if value < limits[0]:
            break  # it runs off the plot; along its edge it would look like a plateau
    return polyline(shown)


def _head(
    row: KernelRow,
    line: str,
    additive: bool,
    dot: tuple[Scale, float] | None,
    opacity: float,
) -> Markup:
    learned = ", ".join(f"{k} {format_number(v)}" for k, v in sorted(row.parameters.items()))
    end = reach(row)
    tip = f"head {row.head}" + (f": {learned}" if learned else "")
    if additive:
        last = f"not {-THRESHOLD:g} below its start up to {farthest(row)} tokens"
        tip += f"; effective length {end} tokens" if end is not None else f"; {last}"
    parts = [element("title", tip), element("polyline", points=line)]
    if end is not None and dot is not None:
        x, height = dot
        at = x(math.log2(1 + end))
        parts.append(element("circle", cx=number(at), cy=number(height), r="3.5"))
    return element("g", *parts, opacity=f"{opacity:.2f}", tabindex="0", class_="head")
