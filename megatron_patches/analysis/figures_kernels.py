"""The figure of learned kernels: bias and weight of every head against distance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.kernels import DEFINED, THRESHOLD, extent, one_set, reach
from megatron_patches.analysis.reach_table import reach_notes
from megatron_patches.analysis.rows import KernelRow, RowError
from megatron_patches.analysis.style import GREY, STYLE, footer, grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# exp(-10) of the weight of the nearest token is nothing; steep kernels run off the plot there.
LOWEST_BIAS = -10.0
BIAS, WEIGHT = "bias", "weight"
FROM_ZERO = "bias(d) - bias(0)"
SHADES = "a line a head, paler the more attention it can spread over distances"
DOTS = "dot: {defined}; without one: never so far below"


@dataclass(frozen=True)
class Panel:
    """The heads of one method and layer, and which part of their kernel is drawn.

    ``curves`` has the values of each head at its distances: weights, or biases minus that at
    distance 0, which softmax does not see. ``limits`` are those of the axis, ``name`` is its name.
    Heads ascend by how far they spread attention.
    """

    title: str
    part: str  # BIAS or WEIGHT
    heads: list[KernelRow]
    curves: list[list[float]]

    @property
    def name(self) -> str:
        moved = self.part == BIAS and any(row.bias and row.bias[0] != 0 for row in self.heads)
        return FROM_ZERO if moved else self.part

    @property
    def limits(self) -> tuple[float, float]:
        top = max(max(values) for values in self.curves)
        if self.part == WEIGHT:
            return 0.0, 1.05 * max(top, 1.0)
        lowest = min(min(values) for values in self.curves)
        low, high = max(LOWEST_BIAS, lowest), max(0.0, top)
        room = 0.04 * (high - low) or 0.4
        return low - (room if lowest > LOWEST_BIAS else 0.0), high + room


def kernel_panels(kernels: Iterable[KernelRow]) -> list[Panel]:
    """The panels by method and layer, the weight after the bias where a method has both.

    RowError when there are no kernels, or those of several seeds, runs or sets (``kernels.one_set``).
    """
    key, rows = one_set(kernels)
    seeds = sorted({row.seed for row in rows})
    if len(seeds) > 1:
        raise RowError(f"kernels of several runs in one figure: {key.dataset}, seeds {seeds}")
    groups: dict[str, list[KernelRow]] = {}
    for row in sorted(
        rows, key=lambda row: (series_label(row, window=False), row.layer or 0, row.head)
    ):
        layer = "" if row.layer is None else f", layer {row.layer}"
        title = f"{series_label(row, window=False)}{layer}, step {row.step}"
        groups.setdefault(title, []).append(row)
    found = []
    for title, heads in groups.items():
        parts = [part for part in (BIAS, WEIGHT) if any(getattr(row, part) for row in heads)]
        for part in parts:
            suffix = f", {part}" if len(parts) > 1 else ""
            found.append(_panel(f"{title}{suffix}", part, heads))
    return found


def _panel(title: str, part: str, heads: Sequence[KernelRow]) -> Panel:
    own = [row for row in heads if getattr(row, part)]
    own.sort(key=lambda row: extent(row.distances, getattr(row, part), additive=part == BIAS))
    curves = []
    for row in own:
        values = getattr(row, part)
        curves.append([value - (values[0] if part == BIAS else 0.0) for value in values])
    return Panel(title, part, own, curves)


def kernel_figure(kernels: Iterable[KernelRow], *, notes: Sequence[str] = ()) -> Figure:
    """Learned bias and weight of every head against distance, a panel a method, layer and part.

    Biases are drawn from their value at distance 0. A dot marks the effective length of a head.
    ``notes`` are lines for the foot. RowError: see ``kernel_panels``.
    """
    import matplotlib

    panels = kernel_panels(kernels)
    first = panels[0].heads[0]
    with matplotlib.rc_context(STYLE):
        figure, grid_ = grid(len(panels), 3, (3.3, 2.7))
        for axes, panel in zip(grid_, panels, strict=True):
            _draw(axes, panel)
        trained = "" if first.train_length is None else f", trained on {first.train_length} tokens"
        lines = [f"{first.dataset}{trained}, seed {first.seed}; {SHADES}"]
        if any(panel.part == BIAS for panel in panels):
            lines.append(DOTS.format(defined=DEFINED.format(threshold=THRESHOLD)))
        lines += reach_notes(row for panel in panels for row in panel.heads)
        footer(figure, [*lines, *notes])
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    import matplotlib

    axes.set_xscale("symlog", linthresh=1)
    # In greyscale too, a paler line is a head that reaches farther.
    shades = matplotlib.colormaps["viridis"]
    low, high = panel.limits
    marked = panel.part == BIAS and low < THRESHOLD
    for index, (row, values) in enumerate(zip(panel.heads, panel.curves, strict=True)):
        colour: Any = shades(0.9 * index / max(1, len(panel.heads) - 1))
        axes.plot(row.distances, values, color=colour, linewidth=1.1)
        end = reach(row) if marked else None
        if end is not None:
            axes.plot([end], [THRESHOLD], "o", color=colour, markersize=4, clip_on=False)
    if marked:
        axes.axhline(THRESHOLD, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlim(0, max(row.distances[-1] for row in panel.heads))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("distance (tokens)")
    axes.set_ylim(low, high)
    axes.set_ylabel(panel.name)
    axes.set_title(panel.title, fontsize=9)
