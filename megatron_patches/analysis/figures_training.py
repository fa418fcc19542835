"""Figures of training: raw loss against tokens read, and position parameters while they are learned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.figures import CLOSE_UP_RATIO
from megatron_patches.analysis.looks import Looks, numbered
from megatron_patches.analysis.rows import RowError
from megatron_patches.analysis.style import (
    GREY,
    STYLE,
    footer,
    grid,
    label_ends,
    line_style,
    panels,
)
from megatron_patches.analysis.training_curves import (
    Curve,
    loss_curves,
    parameter_curves,
    training_header,
    validation_curves,
)
from megatron_patches.analysis.training_rows import TrainingRow, comparable_training
from megatron_patches.analysis.undrawn import training_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

END_OF_TRAINING = 0.3  # the share of the tokens that the panel of the end shows
MARKS = 8  # markers on a line
NEAR = ", near the best"
BAND = (
    "line: mean over seeds; band: from the lowest to the highest seed (not in the panel of the end)"
)


def training_figure(
    rows: Iterable[TrainingRow],
    *,
    methods: Sequence[str] | None = None,
    looks: Looks | None = None,
    notes: Sequence[str] = (),
) -> Figure:
    """Training loss (nats per token) as logged against tokens read, its end, and validation loss.

    The mean over seeds; bands from the lowest to the highest seed (not in the panel of the end, where
    they would cover the lines). Nothing is smoothed. Where a run ends far above the best, a further
    panel shows those near it, and so do the panels of the end and of validation. Runs that were not
    completed are named at the foot, where ``notes`` follow. RowError when the runs may not meet, or
    none was completed.
    """
    import matplotlib

    rows = comparable_training(_only(rows, methods))
    curves, held_out = loss_curves(rows), validation_curves(rows)
    if not curves:
        raise RowError("no training curve to draw: no run was completed")
    looks = looks or numbered(rows)
    near, near_held_out = near_best(curves), near_best(held_out)
    close_up = len(near) < len(curves)
    with matplotlib.rc_context(STYLE):
        figure, every = panels(2 + close_up + bool(held_out), [curve.label for curve in curves])
        places = iter(every)
        title = f"Training loss as logged, {rows[0].dataset}"
        _draw(next(places), curves, curves, looks, title)
        if close_up:
            axes = next(places)
            _draw(axes, curves, near, looks, f"The same{NEAR}")
            axes.set_ylim(*_room([v for curve in near for v in curve.mean]))
            _label(axes, near, looks)
        axes, suffix = next(places), NEAR if close_up else ""
        title = f"The same, its last {100 * END_OF_TRAINING:g}%{suffix}"
        _draw(axes, curves, near, looks, title, band=False)
        _limit_to_end(axes, near)
        _label(axes, near, looks)
        if held_out:
            axes, suffix = next(places), NEAR if len(near_held_out) < len(held_out) else ""
            _draw(axes, held_out, near_held_out, looks, f"Validation loss{suffix}")
            if suffix:
                axes.set_ylim(*_room([v for curve in near_held_out for v in curve.mean]))
            _label(axes, near_held_out, looks)
        _label(every[0], curves, looks)
        bands = [BAND] if any(curve.seeds > 1 for curve in curves) else ["one seed: no band"]
        footer(figure, [*training_header(rows), *bands, *training_notes(rows), *notes])
    return figure


def near_best(curves: Sequence[Curve]) -> list[Curve]:
    """The curves that end within log(CLOSE_UP_RATIO) nats of the lowest end."""
    best = min((curve.mean[-1] for curve in curves), default=0.0)
    return [curve for curve in curves if curve.mean[-1] <= best + math.log(CLOSE_UP_RATIO)]


def _only(rows: Iterable[TrainingRow], methods: Sequence[str] | None) -> list[TrainingRow]:
    rows = list(rows)
    return [row for row in rows if methods is None or row.method in methods]


def _draw(
    axes: Axes,
    curves: Sequence[Curve],
    banded: Sequence[Curve],
    looks: Looks,
    title: str,
    *,
    band: bool = True,
) -> None:
    # Bands of lines that leave the panel would only cover those that stay.
    for curve in curves:
        _draw_loss(axes, curve, looks[curve.label], band and curve in banded)
    axes.set_xlabel("tokens read (millions)")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
    axes.set_title(title, pad=16)


def _label(axes: Axes, curves: Sequence[Curve], looks: Looks) -> None:
    ends = [
        (c.label, c.tokens[-1], c.mean[-1], line_style(looks[c.label])["color"]) for c in curves
    ]
    label_ends(axes, ends)


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
        markevery=(index * every // 16 % every, every),
    )


def _limit_to_end(axes: Axes, curves: Sequence[Curve]) -> None:
    """The last tokens, and the range of ``curves`` there."""
    last = max(curve.tokens[-1] for curve in curves)
    start = (1 - END_OF_TRAINING) * last
    axes.set_xlim(start, last + 0.02 * (last - start))
    shown = [
        value
        for curve in curves
        for tokens, value in zip(curve.tokens, curve.mean, strict=True)
        if tokens >= start
    ]
    axes.set_ylim(*_room(shown))


def _room(values: Sequence[float]) -> tuple[float, float]:
    room = 0.04 * (max(values) - min(values)) or 0.1
    return min(values) - room, max(values) + room


def parameters_figure(
    rows: Iterable[TrainingRow], *, methods: Sequence[str] | None = None
) -> Figure:
    """Each position parameter of each method against tokens read: a panel each.

    A thick line is the mean over heads and seeds, a thin one the mean over heads of one seed; the band
    reaches from the lowest to the highest head of all seeds. RowError when there is nothing to draw.
    """
    import matplotlib

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
    with matplotlib.rc_context(STYLE):
        figure, every = grid(len(panels_), 4, (2.7, 2.1))
        for axes, (label, name, curve) in zip(every, panels_, strict=True):
            axes.fill_between(curve.tokens, curve.low, curve.high, color="#bbbbbb", linewidth=0)
            for single in _singles(rows, label, name):
                axes.plot(single.tokens, single.mean, color=GREY, linewidth=0.6)
            axes.plot(curve.tokens, curve.mean, color="#0072b2", linewidth=1.6)
            axes.set_title(f"{label}: {name}", fontsize=8)
            axes.set_xlabel("tokens read (millions)", fontsize=8)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
        seeds = len({row.seed for row in rows if row.status == "ok"})
        lines = [
            f"{rows[0].dataset}, trained on {rows[0].train_length} tokens, {seeds} "
            f"seed{'s' if seeds > 1 else ''}",
            "thick: mean over heads (and buckets) and seeds; thin: mean over heads of each seed; band: "
            "from the lowest to the highest head of all seeds",
        ]
        learned = [row for row in rows if row.position or row.status != "ok"]
        footer(figure, lines + training_notes(learned))
    return figure


def _singles(rows: Sequence[TrainingRow], label: str, name: str) -> list[Curve]:
    own = [row for row in rows if series_label(row) == label and row.status == "ok"]
    return [curve for row in own for curve in parameter_curves([row]).get(name, ())]
