"""Retrieval by length as a table: means over depths, with an interval over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_patches.analysis.aggregate import series_label, shorten
from megatron_patches.analysis.layout import ABSENT, Cell, Notes, Table
from megatron_patches.analysis.retrieval_grid import (
    VALUES,
    Square,
    axes_of,
    collect_retrieval,
    decimals_for,
    half_interval,
    over_depths,
    retrieval_provenance,
    shown,
    title,
)
from megatron_patches.analysis.retrieval_rows import RetrievalRow, latest_retrieval
from megatron_patches.analysis.statistics import summarize


def retrieval_table(
    rows: Iterable[RetrievalRow], *, value: str = "gain", methods: Sequence[str] | None = None
) -> Table:
    """One of VALUES for each method (down) at each length (across), averaged over the depths.

    A seed without a score at one of the depths is left out of its cell and named below. The highest
    mean of a column is bold, among the cells with the most seeds. RowError when rows may not meet.
    """
    chosen = [row for row in rows if methods is None or row.method in methods]
    grid = collect_retrieval(chosen, methods)
    lengths, depths = axes_of(grid)
    expected = len({row.seed for row in chosen})
    squares = [square for line in grid.values() for square in line.values()]
    places = decimals_for(mean for s in squares if (mean := s.mean(value)) is not None)
    notes = Notes()
    cells = {
        label: [_cell(line, n, depths, value, places, expected, notes) for n in lengths]
        for label, line in grid.items()
    }
    for column in range(len(lengths)):
        _embolden(cells, column)
    return Table(
        title=f"{VALUES[value]}: {title(chosen[0])}",
        corner="method",
        columns=tuple(str(length) for length in lengths),
        rows=tuple((label, tuple(line)) for label, line in cells.items()),
        header=(*retrieval_provenance(chosen), _configurations(chosen), _spread(expected)),
        notes=notes.lines(),
    )


def _spread(seeds: int) -> str:
    if seeds == 1:
        return "mean over depths; one seed: no interval"
    return f"mean over depths and seeds ± half the 95 % confidence interval over {seeds} seeds (t)"


def _cell(
    line: dict[tuple[int, float], Square],
    length: int,
    depths: Sequence[float],
    value: str,
    places: int,
    expected: int,
    notes: Notes,
) -> Cell:
    means, reasons = over_depths(line, length, depths, value)
    if not means and not reasons:
        return Cell(ABSENT)
    causes = sorted(set(reasons.values()))
    if not means:
        statuses = {cause.partition(":")[0] for cause in causes if ":" in cause}
        text = "/".join(sorted(statuses)) or ABSENT
        return Cell(text, marks=tuple(notes.mark(cause) for cause in causes))
    summary = summarize(means.values())
    half = half_interval(summary)
    marks: tuple[str, ...] = ()
    if summary.count < expected:
        marks = (notes.mark("; ".join([f"{summary.count} of {expected} seeds", *causes])),)
    return Cell(
        shown(summary.mean, places),
        "" if half is None else shown(half, places),
        marks=marks,
        mean=summary.mean,
        std=summary.std,
        seeds=summary.count,
    )


def _embolden(cells: dict[str, list[Cell]], column: int) -> None:
    """Make the highest mean of a column bold, among the cells with the most seeds there."""
    column_cells = [row[column] for row in cells.values() if row[column].mean is not None]
    most = max((cell.seeds for cell in column_cells), default=0)
    best = max((c.mean for c in column_cells if c.seeds == most and c.mean is not None), default=0)
    # Where nobody retrieves anything, nobody does best.
    for row in cells.values():
        if best > 0 and row[column].seeds == most and row[column].mean == best:
            row[column] = replace(row[column], bold=True)


def _configurations(rows: Iterable[RetrievalRow]) -> str:
    hashes: dict[str, dict[str, None]] = {}
    for row in sorted(latest_retrieval(rows), key=lambda row: (series_label(row), row.seed)):
        hashes.setdefault(series_label(row), {})[shorten(row.config_sha)] = None
    return "configs " + "; ".join(f"{label} {' '.join(found)}" for label, found in hashes.items())
