"""The figure of perplexity by length, as a pure function of rows.

It is a matplotlib figure; ``style.save`` writes it. matplotlib loads on first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_patches.analysis.aggregate import (
    Group,
    Series,
    collect,
    only,
    provenance,
)
from megatron_patches.analysis.looks import Looks, numbered
from megatron_patches.analysis.rows import Row, RowError
from megatron_patches.analysis.statistics import summarize
from megatron_patches.analysis.style import GREY, STYLE, footer, label_ends, line_style, panels
from megatron_patches.analysis.svg import plain, ticks
from megatron_patches.analysis.undrawn import perplexity_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Beyond this ratio between the worst and the best perplexity, a second panel shows the best ones.
CLOSE_UP_RATIO = 4.0


def perplexity_figure(
    rows: Iterable[Row],
    *,
    methods: Sequence[str] | None = None,
    looks: Looks | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """Perplexity against evaluation length, both logarithmic; a band of ± one std over seeds.

    Where methods lie far apart, a second panel shows those near the best. A cell without a result
    is a gap, and named at the foot. ``looks`` numbers the labels, so that they look the same in
    several figures; ``notes`` are further lines of the foot. RowError when the rows may not meet, or
    none of them has a perplexity.
    """
    import matplotlib

    chosen = only(rows, methods)
    series = collect(chosen, methods)
    means = [m for groups in series.values() for m, _ in _curve(groups).values()]
    if not means:
        raise RowError("no perplexity to draw: every cell was refused or failed")
    looks = looks or numbered(chosen)
    seeds = len({row.seed for row in chosen})
    close_up = max(means) > CLOSE_UP_RATIO * min(means)
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(2 if close_up else 1, [_end_label(*item) for item in series.items()])
        _draw_perplexity(axes[0], series, looks, chosen[0].train_length, None)
        axes[0].set_title(f"Perplexity, {chosen[0].dataset}", pad=16)
        if close_up:
            low, high = min(means), min(max(means), 1.35 * min(means))
            _draw_perplexity(axes[1], series, looks, chosen[0].train_length, (0.97 * low, high))
            axes[1].set_title("The same, near the best", pad=16)
        told = [*provenance(chosen), spread_over(seeds), *perplexity_notes(series, seeds)]
        footer(figure, [*told, *notes])
    return figure


def spread_over(seeds: int) -> str:
    """What lines and bands of a perplexity are."""
    if seeds == 1:
        return "one seed: no band"
    return f"line: mean over {seeds} seeds; band: ± one standard deviation (n - 1) over them"


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
    axes: Axes,
    series: Series,
    looks: Mapping[str, int],
    train_length: int,
    limits: tuple[float, float] | None,
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = sorted({length for groups in series.values() for length in groups})
    ends = []
    for label, groups in series.items():
        curve = _curve(groups)
        if not curve:
            continue
        style = line_style(looks[label])
        # A length without a result is not a number: a gap in the line.
        lengths = [length for length in every if min(curve) <= length <= max(curve)]
        pairs = [curve.get(length, (math.nan, 0.0)) for length in lengths]
        means = [mean for mean, _ in pairs]
        # A band that reached zero could not be drawn on a logarithmic axis.
        lower = [max(mean - std, mean / 10) for mean, std in pairs]
        upper = [mean + std for mean, std in pairs]
        # Bands of lines that leave the panel would only cover those that stay.
        stays = limits is None or limits[0] <= means[-1] <= limits[1]
        if stays:
            axes.fill_between(lengths, lower, upper, color=style["color"], alpha=0.15, linewidth=0)
        axes.plot(lengths, means, **style)
        if stays:
            ends.append((_end_label(label, groups), lengths[-1], means[-1], style["color"]))
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
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.yaxis.set_major_locator(FixedLocator(ticks(*axes.get_ylim())))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def mark_training(axes: Axes, train_length: int, *, word: bool = True) -> None:
    """A dashed line at the training length, with a ``word`` above."""
    axes.axvline(train_length, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    if not word:
        return
    axes.annotate(
        f"trained on {train_length}",
        xy=(train_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=7,
        color=GREY,
    )
