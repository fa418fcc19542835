"""Heat maps of retrieval: evaluation length across, depth down, a panel a method.

``heat_map`` returns a matplotlib figure; ``style.save`` writes it. matplotlib loads on first use.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_patches.analysis.jsonl import RowError
from megatron_patches.analysis.layout import ABSENT
from megatron_patches.analysis.retrieval_grid import (
    VALUES,
    Square,
    axes_of,
    collect_retrieval,
    decimals_for,
    retrieval_provenance,
    seeds_in,
    short_notes,
    shown,
    title,
)
from megatron_patches.analysis.retrieval_rows import RetrievalRow
from megatron_patches.analysis.style import GREY, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ACROSS = 4  # panels in a row
# In inches: a cell, and what surrounds the cells of a panel and of the figure.
CELL_WIDTH, CELL_HEIGHT = 0.55, 0.3
LEFT, RIGHT, ABOVE, BELOW, TOP, FOOT = 0.5, 0.15, 0.32, 0.45, 0.5, 0.15
NARROWEST = 4.4  # room for the title
NOTE_LINE = 0.105
DARKEST = 0.85  # of the greys, so that a black frame still shows
HATCH = "////"
SAID = (
    "Depth 0: the needle at the start of the window; 1: right before the question. Mean over seeds; "
    "1/3: over one of three. Hatched: no score."
)


def heat_map(
    rows: Iterable[RetrievalRow],
    *,
    value: str = "gain",
    methods: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """One of VALUES, mean over seeds, as greys with the number in each cell; darker is more.

    All panels share one scale: 0 to 1 for shares, 0 to the highest for gains; what is not above 0 is
    white. Refused and failed cells are hatched and named; a cell without a row is left blank. A mean over
    some of the seeds says over how many, and why at the foot, where ``notes`` follow. RowError when the
    rows may not meet, or none of them has a score.
    """
    import matplotlib
    from matplotlib.figure import Figure

    chosen = [row for row in rows if methods is None or row.method in methods]
    grid = collect_retrieval(chosen, methods)
    lengths, depths = axes_of(grid)
    squares = [square for line in grid.values() for square in line.values()]
    means = [mean for square in squares if (mean := square.mean(value)) is not None]
    if not means:
        raise RowError("no retrieval to draw: every cell was refused or failed")
    top = max(means) if value == "gain" else 1.0
    across = min(MOST_ACROSS, len(grid))
    down = math.ceil(len(grid) / across)
    panel = (LEFT + CELL_WIDTH * len(lengths) + RIGHT, ABOVE + CELL_HEIGHT * len(depths) + BELOW)
    width = max(across * panel[0], NARROWEST)
    told = _wrapped([SAID, *short_notes(grid), *retrieval_provenance(chosen), *notes], width)
    foot = FOOT + NOTE_LINE * len(told)
    height = TOP + down * panel[1] + foot
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        for index, (label, line) in enumerate(grid.items()):
            left = index % across * panel[0] + LEFT
            bottom = foot + (down - 1 - index // across) * panel[1] + BELOW
            size = (panel[0] - LEFT - RIGHT, CELL_HEIGHT * len(depths))
            axes = figure.add_axes(
                (left / width, bottom / height, size[0] / width, size[1] / height)
            )
            drawn = _Drawn(value, top, decimals_for(means), seeds_in(grid))
            _panel(axes, line, (lengths, depths), drawn)
            axes.set_title(textwrap.shorten(label, 40), pad=4)
            if index % across == 0:
                axes.set_ylabel("depth")
        edge, top = 0.1 / width, 1 - 0.08 / height
        figure.text(edge, top, VALUES[value], va="top", size=10)
        figure.text(edge, top - 0.19 / height, title(chosen[0]), va="top", size=8)
        figure.text(edge, 0.08 / height, "\n".join(told), va="bottom", size=6, color=GREY)
    return figure


@dataclass(frozen=True)
class _Drawn:
    """What all cells have in common: one of VALUES, the highest of its means, decimals, seeds."""

    value: str
    top: float
    places: int
    seeds: int


def _wrapped(lines: Sequence[str], inches: float) -> list[str]:
    # 0.6 em is the mean width of a letter, rounded up, here of 6 points.
    letters = int((inches - 0.2) * 72 / (0.6 * 6))
    return [part for line in lines for part in textwrap.wrap(line, letters)]


def _panel(
    axes: Axes,
    line: dict[tuple[int, float], Square],
    ticks: tuple[list[int], list[float]],
    drawn: _Drawn,
) -> None:
    lengths, depths = ticks
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            square = line.get((length, depth), Square())
            _cell(axes, (column, row), square, drawn)
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(len(depths) - 0.5, -0.5)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], size=7)
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], size=7)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("length (tokens)", size=8)


def _cell(axes: Axes, place: tuple[int, int], square: Square, drawn: _Drawn) -> None:
    from matplotlib.patches import Rectangle

    mean, seeds = square.mean(drawn.value), square.seeds_of(drawn.seeds)
    look: dict[str, Any] = {
        "facecolor": "white",
        "edgecolor": GREY,
        "linewidth": 0.4,
        "clip_on": False,
    }
    ink, text = "black", shown(mean, drawn.places) if mean is not None else square.status or ABSENT
    if mean is not None:
        # A gain below 0 is told by its number.
        dark = DARKEST * mean / drawn.top if mean > 0 else 0.0
        look["facecolor"] = str(1 - dark)
        ink = "white" if dark > 0.5 else "black"
    elif square.problems:
        look |= {"hatch": HATCH, "edgecolor": "#bbbbbb"}
    axes.add_patch(Rectangle((place[0] - 0.5, place[1] - 0.5), 1, 1, **look))
    text, size = (f"{text}\n{seeds}", 5) if seeds else (text, 6)
    axes.text(*place, text, ha="center", va="center", color=ink, size=size, linespacing=1.0)
