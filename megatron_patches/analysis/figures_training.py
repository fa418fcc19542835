"""Figures of training: raw loss against tokens read, and position parameters while they are learned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.figures import footer
from megatron_patches.analysis.rows import RowError
from megatron_patches.analysis.style import GREY, STYLE, label_ends, line_style, panels
from megatron_patches.analysis.training_curves import (
    Curve,
    loss_curves,
    parameter_curves,
    training_header,
    validation_curves,
)
from megatron_patches.analysis.training_rows import TrainingRow, comparable_training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

END_OF_TRAINING = 0.3  # the share of the tokens that the second panel shows
MARKS = 8  # markers on a line


def training_figure(rows: Iterable[TrainingRow], *, methods: Sequence[str] | None = None) -> Figure:
    """Training loss (nats per token) as logged against tokens read, its end, and validation loss.

    The mean over seeds; bands from the lowest to the highest seed (not in the panel of the end, where
    they would cover the lines). Nothing is smoothed. RowError when the runs may not meet, or none of
    them was completed.
    """
    import matplotlib

    rows = comparable_training(_only(rows, methods))
    curves, held_out = loss_curves(rows), validation_curves(rows)
    if not curves:
        raise RowError("no training curve to draw: no run was completed")
    numbers = {curve.label: index for index, curve in enumerate(curves)}
    with matplotlib.rc_context(STYLE):
        figure, axes = panels(3 if held_out else 2, list(numbers))
        for panel, shown in zip(axes, (curves, curves, held_out), strict=False):
            for curve in shown:
                _draw_loss(panel, curve, numbers[curve.label], panel is not axes[1])
            panel.set_xlabel("tokens read (millions)")
            panel.set_ylabel("loss (nats per token)")
            panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
        _limit_to_end(axes[1], curves)
        axes[0].set_title(f"Training loss as logged, {rows[0].dataset}", pad=16)
        axes[1].set_title(f"The same, its last {100 * END_OF_TRAINING:g}%", pad=16)
        if held_out:
            axes[2].set_title("Validation loss", pad=16)
        for panel, shown in zip(axes, (curves, curves, held_out), strict=False):
            label_ends(
                panel,
                [
                    (c.label, c.tokens[-1], c.mean[-1], line_style(numbers[c.label])["color"])
                    for c in shown
                ],
            )
        footer(figure, training_header(rows))
    return figure


def _only(rows: Iterable[TrainingRow], methods: Sequence[str] | None) -> list[TrainingRow]:
    rows = list(rows)
    return [row for row in rows if methods is None or row.method in methods]


def _draw_loss(axes: Axes, curve: Curve, index: int, band: bool) -> None:
    style = line_style(index)
    if band and curve.seeds > 1:
        axes.fill_between(
            curve.tokens, curve.low, curve.high, color=style["color"], alpha=0.15, linewidth=0
        )
    every = max(1, len(curve.tokens) // MARKS)
    axes.plot(
        curve.tokens,
        curve.mean,
        **{**style, "linewidth": 1.0, "markersize": 4},
        markevery=(index * every // 16, every),
    )


def _limit_to_end(axes: Axes, curves: list[Curve]) -> None:
    last = max(curve.tokens[-1] for curve in curves)
    start = (1 - END_OF_TRAINING) * last
    axes.set_xlim(start, last + 0.02 * (last - start))
    shown = [
        value
        for curve in curves
        for tokens, value in zip(curve.tokens, curve.mean, strict=True)
        if tokens >= start
    ]
    room = 0.04 * (max(shown) - min(shown)) or 0.1
    axes.set_ylim(min(shown) - room, max(shown) + room)


def parameters_figure(
    rows: Iterable[TrainingRow], *, methods: Sequence[str] | None = None
) -> Figure:
    """Each position parameter of each method against tokens read: a panel each.

    A thick line is the mean over heads and seeds, a thin one the mean over heads of one seed; the band
    reaches from the lowest to the highest head of all seeds. RowError when there is nothing to draw.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = comparable_training(_only(rows, methods))
    found = parameter_curves(rows)
    panels_ = sorted(
        ((curve.label, name, curve) for name, curves in found.items() for curve in curves),
        key=lambda item: item[:2],
    )
    if not panels_:
        raise RowError(
            "no position parameters to draw: these methods learn none, or none was logged"
        )
    columns = min(4, len(panels_))
    lines = math.ceil(len(panels_) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.4 + 2.7 * columns, 0.7 + 2.1 * lines), layout="constrained")
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, (label, name, curve) in zip(grid, panels_, strict=False):
            axes.fill_between(curve.tokens, curve.low, curve.high, color="#bbbbbb", linewidth=0)
            for single in _singles(rows, label, name):
                axes.plot(single.tokens, single.mean, color=GREY, linewidth=0.6)
            axes.plot(curve.tokens, curve.mean, color="#0072b2", linewidth=1.6)
            axes.set_title(f"{label}: {name}", fontsize=8)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
        for axes in grid[len(panels_) :]:
            axes.set_axis_off()
        count = len({row.seed for row in rows})
        seeds = f"{count} seed" + ("s" if count > 1 else "")
        figure.supxlabel(
            f"tokens read (millions); {rows[0].dataset}, trained on {rows[0].train_length} tokens, "
            f"{seeds}: mean over heads (and buckets), band from the lowest to the highest",
            fontsize=7,
            color=GREY,
        )
    return figure


def _singles(rows: Sequence[TrainingRow], label: str, name: str) -> list[Curve]:
    own = [row for row in rows if series_label(row) == label and row.status == "ok"]
    return [curve for row in own for curve in parameter_curves([row]).get(name, ())]
