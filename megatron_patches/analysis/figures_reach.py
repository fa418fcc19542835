"""The cumulative figure of effective length (KERPLE, arXiv 2205.09921, appendix A.5, figure 6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_patches.analysis.figures import footer
from megatron_patches.analysis.kernels import (
    THRESHOLD,
    UNEVEN,
    cumulative,
    farthest,
    kernel_sets,
    reaches,
)
from megatron_patches.analysis.rows import KernelRow, RowError
from megatron_patches.analysis.style import STYLE, label_ends, line_style, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINED = "effective length: smallest distance with bias < {threshold:g}"
ENDLESS = (
    "heads that stay above it up to {limit} tokens are not counted: their curves end below the number "
    "of heads"
)


def steps_of(
    seeds: Sequence[Sequence[int | None]], limit: int
) -> tuple[list[int], list[list[int]], list[float]]:
    """Distances where a curve rises (from 1 to ``limit``), the counts of each seed, their mean."""
    rises = {max(1, length) for lengths in seeds for length in lengths if length is not None}
    at = sorted({1, limit} | {d for d in rises if d <= limit})
    counts = [[cumulative(lengths, d) for d in at] for lengths in seeds]
    return at, counts, [sum(column) / len(column) for column in zip(*counts, strict=True)]


def reach_figure(kernels: Iterable[KernelRow], *, methods: Sequence[str] | None = None) -> Figure:
    """Number of heads whose effective length is at most d, against d on a logarithmic axis.

    A line a method, mean over seeds, with the single seeds thin; heads of all layers count. RowError
    when no row has a bias, or rows of several data sets or training lengths are given.
    """
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    biased = [row for row in kernels if row.bias is not None]
    biased = [row for row in biased if methods is None or row.method in methods]
    sets = kernel_sets(biased)
    if not sets:
        raise RowError("no learned bias: nothing has an effective length")
    if len(sets) > 1:
        shown = ", ".join(f"{dataset} (trained on {length})" for dataset, length in sets)
        raise RowError(f"kernels of several data sets or training lengths in one figure: {shown}")
    ((dataset, trained), rows) = next(iter(sets.items()))
    limit = max(farthest(row) for row in rows)
    found = reaches(rows)
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = panels(1, list(found))
        axes.set_xscale("log", base=2)
        ends = []
        for index, (label, seeds) in enumerate(found.items()):
            style = line_style(index)
            at, counts, mean = steps_of(list(seeds.values()), limit)
            if len(counts) > 1:
                for single in counts:
                    axes.step(
                        *(at, single), where="post", color=style["color"], linewidth=0.5, alpha=0.5
                    )
            axes.step(at, mean, where="post", **{**style, "linewidth": 1.3, "markersize": 4})
            ends.append((label, at[-1], mean[-1], style["color"]))
        axes.set_xlim(1, limit)
        heads = max(len(lengths) for seeds in found.values() for lengths in seeds.values())
        axes.set_ylim(-0.02 * heads, 1.04 * heads)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("distance d (tokens)")
        axes.set_ylabel("heads with effective length ≤ d")
        suffix = "" if trained is None else f", trained on {trained}"
        axes.set_title(f"Effective length, {dataset}{suffix}", pad=16)
        label_ends(axes, ends)
        lines = [f"{DEFINED.format(threshold=THRESHOLD)}; thick: mean over seeds, thin: each seed"]
        lines.append(ENDLESS.format(limit=f"{limit:,}"))
        if any(row.searched_to is None for row in rows):
            lines.append(UNEVEN)
        footer(figure, lines)
    return figure
