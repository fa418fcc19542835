"""What the charts of the report are made of: scales, ticks, axes and shapes of inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_patches.analysis.markup import Markup, element, join

COLOURS, DASHES = 8, 12  # classes c0 to c7 and d0 to d11 of report.css
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


def look(index: int) -> str:
    """The classes of colour and dashes, another pair for each of 96 labels.

    The dashes alone tell twelve labels that follow one another apart, for readers of grey print.
    """
    turn = index // math.lcm(COLOURS, DASHES)  # after it the same pairs would come again
    return f"c{index % COLOURS} d{(index + turn) % DASHES}"


def ticks(low: float, high: float) -> list[float]:
    """Plain numbers between two positive ones, for a logarithmic axis (``report.js`` has a twin)."""
    if high / low <= WIDE_RANGE:
        return even_ticks(low, high)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first) / 8)  # powers of ten between two ticks
    factors = (1, 3) if every == 1 else (1,)
    found = [factor * 10.0**power for power in range(first, last, every) for factor in factors]
    return [value for value in found if low <= value <= high]


def even_ticks(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next((unit * factor for factor in (1, 2, 5) if unit * factor >= rough), unit * 10)
    counts = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [float(f"{step * count:.12g}") for count in counts]


def plain(value: float) -> str:
    """A tick as printed: 10000 and 22.5; from 1e5 on, 1.5e5, which fits beside an axis (``report.js``
    has a twin)."""
    if abs(value) < 1e5:
        return f"{value:g}"
    digits, _, power = f"{value:.3e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """Maps [low, high] to [start, end]."""
    width = (high - low) or 1.0
    return lambda value: start + (value - low) / width * (end - start)


def svg_tags(box: Box, title: str) -> Mapping[str, str]:
    """Attributes of the ``svg`` element."""
    return {"viewBox": f"0 0 {box.width} {box.height}", "role": "group", "aria_label": title}


def frame(box: Box, below: str, left: str) -> Markup:
    """Both axes with their names."""
    middle, centre = (box.top + box.bottom) / 2, (box.left + box.right) / 2
    return join(
        [
            segment(box.left, box.bottom, box.right, box.bottom, class_="axis"),
            segment(box.left, box.top, box.left, box.bottom, class_="axis"),
            label(centre, box.bottom + 38, below),
            label(0, 0, left, transform=f"translate(14 {number(middle)}) rotate(-90)"),
        ]
    )


def tick_x(box: Box, at: float, word: str, **tags: str) -> Markup:
    """A tick below the plot."""
    mark = segment(at, box.bottom, at, box.bottom + 4, class_="axis")
    return element("g", mark, label(at, box.bottom + 18, word), **tags)


def tick_y(box: Box, at: float, word: str) -> Markup:
    """A grid line with its value on the left."""
    words = label(box.left - 6, at + 4, word, class_="end")
    return join([segment(box.left, at, box.right, at, class_="grid"), words])


def segment(x1: float, y1: float, x2: float, y2: float, **attributes: str) -> Markup:
    """A ``line`` element."""
    return element("line", x1=number(x1), y1=number(y1), x2=number(x2), y2=number(y2), **attributes)


def label(x: float, y: float, word: str, **attributes: str) -> Markup:
    """A ``text`` element."""
    return element("text", word, x=number(x), y=number(y), **attributes)


def polyline(pairs: Sequence[tuple[float, float]]) -> str:
    """The value of a ``points`` attribute."""
    return " ".join(f"{number(x)},{number(y)}" for x, y in pairs)


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}"
