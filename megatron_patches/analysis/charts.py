"""Charts of the report as inline SVG: shapes with titles to hover, styled by the page's CSS.

They stand without JavaScript. ``report.js`` only moves what is there when a filter changes, by the
numbers that each point carries (``data-value``, ``data-low``, ``data-high``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_patches.analysis.figures import LOWEST_BIAS, reach_of
from megatron_patches.analysis.kernels import THRESHOLD, effective_length
from megatron_patches.analysis.layout import format_number
from megatron_patches.analysis.markup import Markup, element, join
from megatron_patches.analysis.rows import KernelRow

COLOURS, DASHES = 8, 4  # classes c0 to c7 and d0 to d3 of report.css
WIDE_RANGE = 6.0  # from this ratio on, ticks are powers of ten and their threefold
LEGEND_PITCH = 18
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Box:
    """The plot inside its picture, in the picture's units."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


PERPLEXITY = Box(width=820, height=380, left=64, right=560, top=28, bottom=330)
KERNEL = Box(width=340, height=250, left=48, right=326, top=14, bottom=206)


@dataclass(frozen=True)
class Point:
    """Mean over seeds at one length in tokens, with the ends of its band."""

    length: int
    value: float
    low: float
    high: float
    tip: str


@dataclass(frozen=True)
class Line:
    """One label of a chart; ``index`` fixes its colour and dashes on the whole page."""

    label: str
    method: str
    index: int
    points: Sequence[Point]

    @property
    def style(self) -> str:
        """The classes of colour and dashes; a colour that comes again has other dashes."""
        turn = self.index // COLOURS
        return f"c{self.index % COLOURS} d{(self.index + turn) % DASHES}"


def perplexity_chart(lines: Sequence[Line], train_length: int) -> Markup:
    """Perplexity against evaluation length, both logarithmic; a legend right of the plot."""
    box = PERPLEXITY
    lengths = sorted({point.length for line in lines for point in line.points})
    low = min(point.low for line in lines for point in line.points)
    high = max(point.high for line in lines for point in line.points)
    low, high = low / 1.03, high * 1.03
    ends = (math.log2(min(*lengths, train_length)), math.log2(max(*lengths, train_length)))
    x = _scale(*ends, box.left + 14, box.right - 14)
    y = _scale(math.log(low), math.log(high), box.bottom, box.top)
    marks = [_tick_x(box, x(math.log2(n)), str(n), data_length=str(n)) for n in lengths]
    rows = [_tick_y(box, y(math.log(value)), f"{value:g}") for value in ticks(low, high)]
    trained = x(math.log2(train_length))
    room = max(box.height, box.top + LEGEND_PITCH * (len(lines) + 1))
    return element(
        "svg",
        _frame(box, "evaluation length (tokens)", "perplexity"),
        element("g", *rows, class_="ticks"),
        *marks,
        _line(trained, box.top, trained, box.bottom, class_="threshold"),
        _text(trained, box.top - 8, f"trained on {train_length}", class_="small"),
        *(_perplexity_line(line, x, y) for line in lines),
        *(_legend(line, place) for place, line in enumerate(_by_last_value(lines))),
        **_svg(replace(box, height=room), "Perplexity against evaluation length"),
        class_="perplexity",
        data_top=str(box.top),
        data_bottom=str(box.bottom),
        data_left=str(box.left),
        data_right=str(box.right),
    )


def ticks(low: float, high: float) -> list[float]:
    """Plain numbers between two positive ones, for a logarithmic axis (``report.js`` has a twin)."""
    if high / low <= WIDE_RANGE:
        return _even_ticks(low, high)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first) / 8)  # powers of ten between two ticks
    factors = (1, 3) if every == 1 else (1,)
    found = [factor * 10.0**power for power in range(first, last, every) for factor in factors]
    return [value for value in found if low <= value <= high]


def _even_ticks(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next((unit * factor for factor in (1, 2, 5) if unit * factor >= rough), unit * 10)
    counts = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [float(f"{step * count:.12g}") for count in counts]


def _by_last_value(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: -line.points[-1].value)


def _perplexity_line(line: Line, x: Scale, y: Scale) -> Markup:
    places = [(x(math.log2(point.length)), point) for point in line.points]
    upper = [(px, y(math.log(point.high))) for px, point in places]
    lower = [(px, y(math.log(point.low))) for px, point in reversed(places)]
    dots = [
        element(
            "circle",
            element("title", point.tip),
            cx=_n(px),
            cy=_n(y(math.log(point.value))),
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
        element("polygon", points=_points([*upper, *lower])),
        element("polyline", points=_points(middle)),
        *dots,
        class_=f"line {line.style}",
        data_method=line.method,
    )


def _legend(line: Line, place: int) -> Markup:
    height, start = PERPLEXITY.top + 12 + LEGEND_PITCH * place, PERPLEXITY.right + 16
    return element(
        "g",
        _line(start, height, start + 30, height),
        _text(start + 36, height + 4, line.label, class_="start"),
        class_=f"key {line.style}",
        data_method=line.method,
    )


def kernel_chart(title: str, heads: Sequence[KernelRow], index: int) -> Markup:
    """Learned bias (or weight) of each head against distance; paler heads reach farther."""
    box, additive = KERNEL, any(row.bias is not None for row in heads)
    drawn = [(row, row.bias if additive else row.weight) for row in heads]
    curves = [(row, values) for row, values in drawn if values is not None]
    top = max(max(values) for _, values in curves)
    low, high = (LOWEST_BIAS, max(top, 0.0) + 0.4) if additive else (0.0, max(top, 1.0) * 1.05)
    farthest = max(row.distances[-1] for row, _ in curves)
    x = _scale(0.0, math.log2(1 + max(1, farthest)), box.left, box.right)
    y = _scale(low, high, box.bottom, box.top)
    order = sorted(curves, key=lambda pair: reach_of(pair[0], additive))
    shapes = []
    for place, (row, values) in enumerate(order):
        opacity = 1 - 0.7 * place / max(1, len(order) - 1)
        shapes.append(_head(row, values, additive, (low, high), x, y, opacity))
    every = [d for d in (1, 10, 100, 1000, 10_000, 100_000) if d <= farthest]
    marks = [_tick_x(box, x(math.log2(1 + distance)), str(distance)) for distance in every]
    rows = [_tick_y(box, y(value), f"{value:g}") for value in _even_ticks(low, high)]
    limit = y(THRESHOLD)
    return element(
        "svg",
        _frame(box, "distance (tokens)", "bias" if additive else "weight"),
        *(*rows, *marks),
        _line(box.left, limit, box.right, limit, class_="threshold") if additive else Markup(""),
        element("g", *shapes, class_=f"heads c{index % COLOURS}"),
        **_svg(box, title),
    )


def _head(
    row: KernelRow,
    values: Sequence[float],
    additive: bool,
    limits: tuple[float, float],
    x: Scale,
    y: Scale,
    opacity: float,
) -> Markup:
    shown = []
    for distance, value in zip(row.distances, values, strict=True):
        shown.append((x(math.log2(1 + distance)), y(min(max(value, limits[0]), limits[1]))))
        if value < limits[0]:
            break  # it runs off the plot; along its edge it would look like a plateau
    learned = ", ".join(f"{k} {format_number(v)}" for k, v in sorted(row.parameters.items()))
    reach = effective_length(row.distances, values) if additive else None
    tip = f"head {row.head}" + (f": {learned}" if learned else "")
    if additive:
        last = f"not below {THRESHOLD:g} up to {row.distances[-1]} tokens"
        tip += f"; effective length {reach} tokens" if reach is not None else f"; {last}"
    parts = [element("title", tip), element("polyline", points=_points(shown))]
    if reach is not None:
        at = x(math.log2(1 + reach))
        parts.append(element("circle", cx=_n(at), cy=_n(y(THRESHOLD)), r="3.5"))
    return element("g", *parts, opacity=f"{opacity:.2f}", tabindex="0", class_="head")


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    width = (high - low) or 1.0
    return lambda value: start + (value - low) / width * (end - start)


def _svg(box: Box, title: str) -> Mapping[str, str]:
    return {"viewBox": f"0 0 {box.width} {box.height}", "role": "group", "aria_label": title}


def _frame(box: Box, below: str, left: str) -> Markup:
    middle, centre = (box.top + box.bottom) / 2, (box.left + box.right) / 2
    return join(
        [
            _line(box.left, box.bottom, box.right, box.bottom, class_="axis"),
            _line(box.left, box.top, box.left, box.bottom, class_="axis"),
            _text(centre, box.bottom + 38, below),
            _text(0, 0, left, transform=f"translate(14 {_n(middle)}) rotate(-90)"),
        ]
    )


def _tick_x(box: Box, at: float, text: str, **tags: str) -> Markup:
    mark = _line(at, box.bottom, at, box.bottom + 4, class_="axis")
    return element("g", mark, _text(at, box.bottom + 18, text), **tags)


def _tick_y(box: Box, at: float, text: str) -> Markup:
    label = _text(box.left - 6, at + 4, text, class_="end")
    return join([_line(box.left, at, box.right, at, class_="grid"), label])


def _line(x1: float, y1: float, x2: float, y2: float, **attributes: str) -> Markup:
    return element("line", x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2), **attributes)


def _text(x: float, y: float, text: str, **attributes: str) -> Markup:
    return element("text", text, x=_n(x), y=_n(y), **attributes)


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in pairs)


def _n(value: float) -> str:
    return f"{value:.1f}"
