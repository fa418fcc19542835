"""Loss by position in the window, and what the text beyond an attention window adds to it.

A control is the same weights evaluated with ``sliding_window_width``: every token attends to that many
tokens only. Where a model uses the text beyond, its loss is below that of its control (KERPLE,
arXiv 2205.09921, figures 5 and 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_patches.analysis.aggregate import (
    WINDOW,
    collect,
    comparable_rows,
    only,
    series_label,
)
from megatron_patches.analysis.rows import Row, RowError

# As many bins as the built-in engine writes (standalone/scoring.py): its rows are drawn as they are.
MOST_BINS = 64


@dataclass(frozen=True)
class PositionLine:
    """One label: mean loss over seeds (nats per token) at ``positions`` in tokens.

    Of a control, ``window`` is the width of its attention in tokens, ``base`` the label of the same
    method with the whole text in view, and ``surplus`` the loss minus that of the same weights
    without the window, over the seeds that have both; None where no seed does.
    """

    label: str
    base: str
    method: str
    window: int | str | None  # a width, or blockwise:b
    seeds: int
    positions: list[float]
    losses: list[float]
    surplus: list[float] | None


def binning(rows: Iterable[Row]) -> str:
    """What a point of the lines of these rows, of one evaluation length, is a mean over."""
    found = {len(row.position_losses): row.eval_length for row in rows if row.position_losses}
    parts = []
    for count, length in sorted(found.items()):
        text = f"{count} bins of {length / count:g} positions"
        wide = f", averaged in {MOST_BINS} bins of equal ratio" if count > MOST_BINS else ""
        parts.append(text + wide)
    return f"a point: the mean over one of {' or '.join(parts)}"


def position_lengths(rows: Iterable[Row]) -> list[int]:
    """Evaluation lengths (tokens) that have losses by position."""
    return sorted({row.eval_length for row in rows if row.position_losses})


def position_lines(
    rows: Iterable[Row], eval_length: int | None = None, methods: Sequence[str] | None = None
) -> list[PositionLine]:
    """The lines of one evaluation length (the longest with data if None), by label.

    More than MOST_BINS bins are averaged in bins of equal ratio, because single positions are
    noisy; ``binning`` says it. RowError when no row has losses by position or the rows may not meet.
    """
    kept = comparable_rows(only(rows, methods))
    lengths = position_lengths(kept)
    if not lengths or (eval_length is not None and eval_length not in lengths):
        raise RowError(f"no losses by position at length {eval_length}; there are {lengths}")
    length = eval_length or lengths[-1]
    chosen = [row for row in kept if row.position_losses and row.eval_length == length]
    by_label = {
        label: [row for row in chosen if series_label(row) == label]
        for label in collect(chosen, methods)
    }
    return [_line(found, by_label) for found in by_label.values()]


def _line(rows: list[Row], by_label: dict[str, list[Row]]) -> PositionLine:
    first = rows[0]
    bins = {len(row.position_losses or ()) for row in rows}
    if len(bins) > 1:
        raise RowError(f"{series_label(first)}: seeds have different numbers of position bins")
    base = series_label(first, window=False)
    controlled = []
    if WINDOW in first.options:
        whole = {(row.seed, row.config_sha): row for row in by_label.get(base, ())}
        controlled = [(row, whole.get((row.seed, row.config_sha))) for row in rows]
    pairs = [
        _minus(row, other)
        for row, other in controlled
        if other is not None and len(other.position_losses or ()) in bins
    ]
    positions, losses = _binned(first.eval_length, [row.position_losses or [] for row in rows])
    return PositionLine(
        label=series_label(first),
        base=base,
        method=first.method,
        window=first.options.get(WINDOW),
        seeds=len(rows),
        positions=positions,
        losses=losses,
        surplus=_binned(first.eval_length, pairs)[1] if pairs else None,
    )


def _minus(row: Row, other: Row) -> list[float]:
    pairs = zip(row.position_losses or (), other.position_losses or (), strict=True)
    return [a - b for a, b in pairs]


def _binned(length: int, lists: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Positions and the mean over ``lists`` there."""
    count, width = len(lists[0]), length / len(lists[0])
    mean = [math.fsum(values[i] for values in lists) / len(lists) for i in range(count)]
    edges = [0]
    for step in range(1, min(MOST_BINS, count) + 1):
        edge = round(count ** (step / MOST_BINS)) if count > MOST_BINS else step
        edges.append(max(edges[-1] + 1, edge) if edge < count else count)
    edges = sorted({edge for edge in edges if edge <= count})
    pairs = list(zip(edges, edges[1:], strict=False))
    x = [width * (a + b) / 2 if b - a > 1 or width > 1 else float(b) for a, b in pairs]
    return x, [math.fsum(mean[a:b]) / (b - a) for a, b in pairs]
