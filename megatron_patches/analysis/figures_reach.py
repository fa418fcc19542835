"""The cumulative figure of effective length (KERPLE, arXiv 2205.09921, appendix A.5, figure 6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_patches.analysis.kernels import DEFINED, THRESHOLD, farthest, one_set, reaches
from megatron_patches.analysis.looks import Looks, numbered
from megatron_patches.analysis.reach_table import cumulative, reach_notes
from megatron_patches.analysis.rows import KernelRow, RowError
from megatron_patches.analysis.style import (
    CONTEXT,
    MOST_TOGETHER,
    STYLE,
    footer,
    grid,
    label_ends,
    line_style,
    panels,
    shrink,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDLESS = (
    "heads that never fall so far up to {limit} tokens are not counted: their curves end below the "
    "number of heads"
)
# What is drawn of one method: distances, the counts of each seed, their mean.
Steps = tuple[list[int], list[list[int]], list[float]]


def steps_of(seeds: Sequence[Sequence[int | None]], limit: int) -> Steps:
    """Distances where a curve rises (from 1 to ``limit``), the counts of each seed, their mean."""
    rises = {max(1, length) for lengths in seeds for length in lengths if length is not None}
    at = sorted({1, limit} | {d for d in rises if d <= limit})
    counts = [[cumulative(lengths, d) for d in at] for lengths in seeds]
    return at, counts, [sum(column) / len(column) for column in zip(*counts, strict=True)]


def reach_figure(
    kernels: Iterable[KernelRow],
    *,
    methods: Sequence[str] | None = None,
    looks: Looks | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """Number of heads whose effective length is at most d, against d on a logarithmic axis.

    A line a method, mean over seeds, with the single seeds thin; heads of all layers count. More than
    MOST_TOGETHER methods have a panel each, with the others in pale grey. ``notes`` are lines for the
    foot. RowError when no row has a bias, or rows of several data sets, training lengths, steps or
    runs are given.
    """
    import matplotlib

    biased = [row for row in kernels if row.bias is not None]
    biased = [row for row in biased if methods is None or row.method in methods]
    if not biased:
        raise RowError("no learned bias: nothing has an effective length")
    key, rows = one_set(biased)
    looks = looks or numbered(rows)
    limit = max(farthest(row) for row in rows)
    found = reaches(rows)
    heads = max(len(lengths) for seeds in found.values() for lengths in seeds.values())
    curves = {label: steps_of(list(seeds.values()), limit) for label, seeds in found.items()}
    trained = "" if key.train_length is None else f", trained on {key.train_length}"
    title = f"Effective length, {key.dataset}{trained}"
    with matplotlib.rc_context(STYLE):
        if len(curves) <= MOST_TOGETHER:
            figure, (axes,) = panels(1, list(curves))
            _draw_together(axes, curves, looks)
            axes.set_title(title, pad=16)
            _frame(axes, limit, heads)
            ends = [
                (label, at[-1], mean[-1], line_style(looks[label])["color"])
                for label, (at, _, mean) in curves.items()
            ]
            label_ends(axes, ends)
        else:
            figure, each = grid(len(curves), 4, (2.7, 2.1))
            for axes, label in zip(each, curves, strict=True):
                for other in curves:
                    axes.step(*curves[other][::2], where="post", color=CONTEXT, linewidth=0.8)
                _draw_together(axes, {label: curves[label]}, looks)
                axes.set_title(label, fontsize=8)
                _frame(axes, limit, heads)
                shrink(axes, "distance d (tokens)", "heads")
            title = f"Heads with an effective length ≤ d, {key.dataset}{trained}"
            figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        footer(figure, [*_foot(rows, found, limit), *notes])
    return figure


def _foot(
    rows: Sequence[KernelRow], found: dict[str, dict[int, list[int | None]]], limit: int
) -> list[str]:
    most = max(len(seeds) for seeds in found.values())
    fewer = [f"{name}: {len(seeds)}" for name, seeds in found.items() if len(seeds) < most]
    lines = [f"{DEFINED.format(threshold=THRESHOLD)}; thick: mean over seeds, thin: each seed"]
    lines += [f"fewer than {most} seeds: {', '.join(fewer)}"] if fewer else []
    return [*lines, ENDLESS.format(limit=f"{limit:,}"), *reach_notes(rows)]


def _draw_together(axes: Axes, curves: dict[str, Steps], looks: Looks) -> None:
    for label, (at, counts, mean) in curves.items():
        style = line_style(looks[label])
        for single in counts if len(counts) > 1 else ():
            axes.step(at, single, where="post", color=style["color"], linewidth=0.5, alpha=0.5)
        axes.step(at, mean, where="post", **{**style, "linewidth": 1.3, "markersize": 4})


def _frame(axes: Axes, limit: int, heads: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(1, limit)
    axes.set_ylim(-0.02 * heads, 1.04 * heads)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("distance d (tokens)")
    axes.set_ylabel("heads with effective length ≤ d")
