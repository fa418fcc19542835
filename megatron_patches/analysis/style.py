"""How figures look and how they are saved: one style, direct labels, reproducible files."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Any: what matplotlib calls this mapping differs between its versions.
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so text is the same on every machine
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.which": "major",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.fonttype": "path",
    "svg.hashsalt": "kerple",  # without it, the identifiers inside an SVG are random
    "path.simplify": True,
    "text.parse_math": False,  # names come from results: a `$` in them is no formula
}
# Okabe and Ito's colours, which colour-blind readers tell apart; their yellow is too pale on white,
# a wine red stands in for it. Orange and sky blue are a shade darker, for the labels' sake.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#000000", "#3a9bd5", "#cc8400", "#882255"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
GREY = "#666666"
# Layout in inches: axes of one size, whatever surrounds them.
AXES_WIDTH, AXES_HEIGHT, LEFT, BOTTOM, TOP = 3.6, 2.8, 0.75, 1.05, 0.55
UNDER_AXES = 0.45  # tick labels and the name of the axis
FOOT_SIZE, FOOT_LINE = 6, 0.105  # points, inches
# With more methods than this in one panel, each has a panel of its own.
MOST_TOGETHER = 6
CONTEXT = "#d8d8d8"  # of the other methods in the panel of one


def panels(count: int, labels: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes side by side and room for ``labels`` right of each."""
    from matplotlib.figure import Figure

    # 0.62 em is the mean width of a letter in the font above, rounded up.
    room = 0.4 + 0.62 * STYLE["font.size"] / 72 * max((len(label) for label in labels), default=0)
    pitch = LEFT + AXES_WIDTH + room
    # Labels stand 1.25 em apart; where they are too many for that, the axes grow.
    tall = max(AXES_HEIGHT, 1.25 * STYLE["font.size"] / 72 * (len(labels) + 1))
    width, height = count * pitch, BOTTOM + tall + TOP
    figure = Figure(figsize=(width, height))
    boxes = [
        ((k * pitch + LEFT) / width, BOTTOM / height, AXES_WIDTH / width, tall / height)
        for k in range(count)
    ]
    return figure, [figure.add_axes(box) for box in boxes]


def grid(count: int, columns: int, cell: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes of about ``cell`` inches, ``columns`` side by side."""
    from matplotlib.figure import Figure

    across = min(columns, count)
    down = math.ceil(count / across)
    size = (0.4 + cell[0] * across, 0.2 + cell[1] * down)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for empty in axes[count:]:
        empty.remove()
    return figure, axes[:count]


def shrink(axes: Axes, x: str, y: str) -> None:
    """Short names ``x`` and ``y`` in small letters, for a panel of ``grid``."""
    axes.set_xlabel(x, fontsize=7)
    axes.set_ylabel(y, fontsize=7)
    axes.tick_params(labelsize=7)


def footer(figure: Figure, lines: Sequence[str]) -> None:
    """What was measured and how, in small print at the foot, wrapped to the figure's width.

    The figure grows by what the lines need; call it last.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width, height = (float(value) for value in figure.get_size_inches())
    # 0.53 em is the mean width of a letter of such lines, rounded up.
    columns = int(width * 72 / (0.53 * FOOT_SIZE))
    shown = [part for line in lines for part in textwrap.wrap(line, columns)]
    foot = FOOT_LINE * len(shown) + 0.08
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        tall = height + foot
        figure.set_size_inches(width, tall)
        engine.set(rect=(0, foot / tall, 1, 1 - foot / tall))
    else:
        boxes = [axes.get_position() for axes in figure.axes]
        more = max(0.0, foot + UNDER_AXES - height * min(box.y0 for box in boxes))
        tall = height + more
        figure.set_size_inches(width, tall)
        for axes, box in zip(figure.axes, boxes, strict=True):
            bottom = (box.y0 * height + more) / tall
            axes.set_position((box.x0, bottom, box.width, box.height * height / tall))
    text = "\n".join(shown)
    figure.text(0.05 / width, 0.05 / tall, text, fontsize=FOOT_SIZE, color=GREY, va="bottom")


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the ``index``-th series; the three repeat at different periods,
    so that series stay apart in greyscale too."""
    turn = index // len(COLOURS)  # a colour that comes again has other dashes
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[(index + turn) % len(DASHES)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near ``wanted`` that keep ``gap`` between them, inside [low, high] where they fit.

    Neighbours that would overlap are merged into a block around their mean, so labels move as
    little as they must.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[list[float]] = []  # centre, count
    for i in order:
        blocks.append([min(max(wanted[i], low), high), 1])
        while len(blocks) > 1:
            (c1, n1), (c2, n2) = blocks[-2:]
            if c2 - c1 >= gap * (n1 + n2) / 2:
                break
            both = n1 + n2
            half = gap * (both - 1) / 2
            centre = max(min((c1 * n1 + c2 * n2) / both, high - half), low + half)
            blocks[-2:] = [[centre, both]]
    placed = [c + gap * (k - (n - 1) / 2) for c, n in blocks for k in range(int(n))]
    result = [0.0] * len(wanted)
    for i, position in zip(order, placed, strict=True):
        result[i] = position
    return result


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Write each (label, x, y, colour) right of the axes at its height, with a leader line.

    Call it when everything is drawn; labels that would overlap are moved apart.
    """
    if not ends:
        return
    axes.autoscale_view()  # limits that were not set follow the data only when somebody asks
    to_axes = axes.transData + axes.transAxes.inverted()
    points = [to_axes.transform((x, y)) for _, x, y, _ in ends]
    height = axes.get_window_extent().height / axes.figure.dpi * 72  # in points
    heights = spread([float(y) for _, y in points], STYLE["font.size"] * 1.25 / height, 0.0, 1.0)
    for (text, _, _, colour), (x, y), place in zip(ends, points, heights, strict=True):
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.05, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=colour,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.7,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def save(figure: Figure, stem: str | os.PathLike[str]) -> list[Path]:
    """Write ``stem``.svg and ``stem``.png; the same figure gives the same bytes every time.

    Files appear whole or not at all. Dates and versions, which would differ from run to run, are
    left out of their metadata. OSError passes on.
    """
    import matplotlib

    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            figure.savefig(buffer, format=suffix, metadata=metadata)
        path = stem.with_name(f"{stem.name}.{suffix}")
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(buffer.getvalue())
        partial.replace(path)
        written.append(path)
    return written
