"""Figures as pure functions of rows: perplexity by length and learned kernels.

Each function returns a matplotlib figure; ``style.save`` writes it. matplotlib loads on first use.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_patches.analysis.aggregate import (
    Group,
    Series,
    collect,
    only,
    provenance,
    series_label,
)
from megatron_patches.analysis.kernels import THRESHOLD, last_kernels, reach
from megatron_patches.analysis.rows import KernelRow, Row, RowError
from megatron_patches.analysis.statistics import summarize
from megatron_patches.analysis.style import GREY, STYLE, label_ends, line_style, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Beyond this ratio between the worst and the best perplexity, a second panel shows the best ones.
CLOSE_UP_RATIO = 4.0
# exp(-10) of the weight of the nearest token is nothing; steep kernels run off the plot there.
LOWEST_BIAS = -10.0
FOOT_SIZE = 6


def perplexity_figure(rows: Iterable[Row], *, methods: Sequence[str] | None = None) -> Figure:
    """Perplexity against evaluation length, both logarithmic; a band of ± one std over seeds.

    Where methods lie far apart, a second panel shows those near the best. RowError when the rows
    may not meet, or none of them has a perplexity.
    """
    import matplotlib

    chosen = only(rows, methods)
    series = collect(chosen, methods)
    means = [m for groups in series.values() for m, _ in _curve(groups).values()]
    if not means:
        raise RowError("no perplexity to draw: every cell was refused or failed")
    close_up = max(means) > CLOSE_UP_RATIO * min(means)
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(2 if close_up else 1, [_end_label(*item) for item in series.items()])
        _draw_perplexity(axes[0], series, chosen[0].train_length, None)
        axes[0].set_title(f"Perplexity, {chosen[0].dataset}", pad=16)
        if close_up:
            low, high = min(means), min(max(means), 1.35 * min(means))
            _draw_perplexity(axes[1], series, chosen[0].train_length, (0.97 * low, high))
            axes[1].set_title("The same, near the best", pad=16)
        footer(figure, provenance(chosen))
    return figure


def _curve(groups: dict[int, Group]) -> dict[int, tuple[float, float]]:
    """Length -> mean and standard deviation (0 for one seed) of the perplexity."""
    curve = {}
    for length in sorted(groups):
        if groups[length].perplexities:
            summary = summarize(groups[length].perplexities.values())
            curve[length] = (summary.mean, summary.std or 0.0)
    return curve


def _end_label(label: str, groups: dict[int, Group]) -> str:
    """The label of a line, with the length where it ends if it could not be scored farther."""
    scored = [length for length, group in groups.items() if group.perplexities]
    beyond = [length for length in groups if not scored or length > max(scored)]
    return f"{label} (to {max(scored, default=0)})" if beyond else label


def _draw_perplexity(
    axes: Axes, series: Series, train_length: int, limits: tuple[float, float] | None
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends = []
    for index, (label, groups) in enumerate(series.items()):
        curve = _curve(groups)
        if not curve:
            continue
        style = line_style(index)
        lengths = list(curve)
        means = [mean for mean, _ in curve.values()]
        # A band that reached zero could not be drawn on a logarithmic axis.
        lower = [max(mean - std, mean / 10) for mean, std in curve.values()]
        upper = [mean + std for mean, std in curve.values()]
        # Bands of lines that leave the panel would only cover those that stay.
        stays = limits is None or limits[0] <= means[-1] <= limits[1]
        if stays:
            axes.fill_between(lengths, lower, upper, color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(lengths, means, **style)
        if stays:
            ends.append((_end_label(label, groups), lengths[-1], means[-1], style["color"]))
    every = sorted({length for groups in series.values() for length in groups})
    axes.set_xticks(every, [str(length) for length in every])
    axes.set_xticks([], minor=True)
    axes.set_xlim(min(every[0], train_length) / 1.15, max(every[-1], train_length) * 1.15)
    if limits is not None:
        axes.set_ylim(*limits)
    _plain_ticks(axes)
    axes.set_xlabel("evaluation length (tokens)")
    axes.set_ylabel("perplexity")
    mark_training(axes, train_length)
    label_ends(axes, ends)


def _plain_ticks(axes: Axes) -> None:
    """Ticks at plain numbers on a logarithmic y axis: 10000 and 22.5, not 10^4."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    wide = high > 6 * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)) if wide else MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def _plain(value: float) -> str:
    """10000 and 22.5; from there 3e5, which fits beside an axis."""
    return f"{value:g}" if value < 1e5 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


def mark_training(axes: Axes, train_length: int) -> None:
    """A dashed line at the training length."""
    axes.axvline(train_length, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"trained on {train_length}",
        xy=(train_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=7,
        color=GREY,
    )


def footer(figure: Figure, lines: Sequence[str]) -> None:
    """What was measured and how, in small print at the foot, wrapped to the figure's width."""
    # 0.53 em is the mean width of a letter of such lines, rounded up.
    columns = int(figure.get_figwidth() * 72 / (0.53 * FOOT_SIZE))
    shown = [part for line in lines for part in textwrap.wrap(line, columns)]
    figure.text(0.01, 0.01, "\n".join(shown), fontsize=FOOT_SIZE, color=GREY, va="bottom")


def kernel_figure(kernels: Iterable[KernelRow]) -> Figure:
    """Learned bias (or weight) of every head against distance, one panel a method and layer.

    The last step of each method is drawn. A dot marks where a head's bias falls below THRESHOLD,
    its effective length. RowError when there are no kernels, or several data sets,
    training lengths or seeds.
    """
    import matplotlib
    from matplotlib.figure import Figure

    groups = kernel_groups(kernels)
    columns = min(3, len(groups))
    lines = math.ceil(len(groups) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.6 + 3.3 * columns, 0.5 + 2.7 * lines), layout="constrained")
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, (title, heads) in zip(grid, groups.items(), strict=False):
            _draw_kernels(axes, title, heads)
        for axes in grid[len(groups) :]:
            axes.set_axis_off()
        first = next(iter(groups.values()))[0]
        trained = "" if first.train_length is None else f", trained on {first.train_length} tokens"
        caption = f"{first.dataset}{trained}, seed {first.seed}; paler heads reach farther"
        if any(row.bias is not None for heads in groups.values() for row in heads):
            caption += f", dots: first distance with bias < {THRESHOLD:g}"
        figure.supxlabel(caption, fontsize=7, color=GREY)
    return figure


def kernel_groups(kernels: Iterable[KernelRow]) -> dict[str, list[KernelRow]]:
    """The heads of each panel by its title: the last step of each method, layer by layer."""
    kernels = last_kernels(kernels)
    if not kernels:
        raise RowError("no kernels to draw")
    sources = sorted({(row.dataset, row.train_length or 0, row.seed) for row in kernels})
    if len(sources) > 1:
        raise RowError(f"kernels of several runs in one figure: {sources}")
    groups: dict[str, list[KernelRow]] = {}
    for row in sorted(kernels, key=lambda row: (series_label(row), row.layer or 0, row.head)):
        layer = "" if row.layer is None else f", layer {row.layer}"
        groups.setdefault(f"{series_label(row)}{layer}, step {row.step}", []).append(row)
    return groups


def _draw_kernels(axes: Axes, title: str, heads: list[KernelRow]) -> None:
    import matplotlib

    additive = any(row.bias is not None for row in heads)
    axes.set_xscale("symlog", linthresh=1)
    # Shades in the order of reach: in greyscale too, a paler line is a head that reaches farther.
    order = sorted(heads, key=lambda row: reach_of(row, additive))
    shades = matplotlib.colormaps["viridis"]
    for index, row in enumerate(order):
        values = row.bias if additive else row.weight
        if values is None:
            continue
        colour: Any = shades(0.9 * index / max(1, len(order) - 1))
        axes.plot(row.distances, values, color=colour, linewidth=1.1)
        end = reach(row)
        if end is not None:
            axes.plot([end], [THRESHOLD], "o", color=colour, markersize=4, clip_on=False)
    axes.set_xlim(0, max(row.distances[-1] for row in heads))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("distance (tokens)")
    if additive:
        top = max(max(row.bias) for row in heads if row.bias is not None)
        axes.set_ylim(LOWEST_BIAS, max(top, 0.0) + 0.4)
        axes.axhline(THRESHOLD, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_ylabel("bias")
    else:
        axes.set_ylim(0, 1.05)
        axes.set_ylabel("weight")
    axes.set_title(title, fontsize=9)


def reach_of(row: KernelRow, additive: bool) -> float:
    """How far a head reaches: the sum of its weights, or of what its biases make of them."""
    values = (row.bias if additive else row.weight) or [0.0]
    return math.fsum(math.exp(min(v, 0.0)) if additive else v for v in values)
