"""The parts of a table: cells, footnotes, number format."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_patches.analysis.statistics import Summary

BETTER_THAN_CELL, CELL_BETTER = "†", "‡"
ABSENT = "–"


@dataclass(frozen=True)
class Cell:
    """One entry: ``text`` (± ``spread``) as printed with its marks, and the numbers behind it.

    ``interval`` is for an entry that is a range; CSV then has a line for either end.
    """

    text: str
    spread: str = ""
    marks: tuple[str, ...] = ()
    bold: bool = False
    mean: float | None = None
    std: float | None = None
    seeds: int = 0
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Table:
    """``rows`` hold a label and one cell for each of ``columns``; ``notes`` explain marks."""

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    header: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def decimals(value: float) -> int:
    """Decimals that show three significant digits: 2.71, 23.9, 750, 30046 (and 0.895)."""
    # The rounded value counts: 9.996 prints as 10.0, not as 10.00.
    for places, limit in ((3, 1), (2, 10), (1, 100)):
        if round(abs(value), places) < limit:
            return places
    return 0


def format_number(value: float, places: int | None = None) -> str:
    """``value`` with three significant digits, or with ``places`` decimals; 1.23e+06 from there."""
    if abs(value) >= 999_999.5:
        return f"{value:.2e}"
    return f"{value:.{decimals(value) if places is None else places}f}"


class Notes:
    """Footnotes in order of first use; the same text keeps its letter."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """The mark that refers to ``text``: ``[1]``, ``[2]``, ..."""
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def lines(self) -> tuple[str, ...]:
        """The footnotes, each behind its mark."""
        return tuple(f"[{number}] {text}" for number, text in enumerate(self.texts, 1))


def number_cell(summary: Summary, places: int | None = None) -> Cell:
    """A cell that prints mean and spread with the same decimals; None: those of three digits."""
    places = decimals(summary.mean) if places is None else places
    spread = "" if summary.std is None else format_number(summary.std, places)
    text = format_number(summary.mean, places)
    return Cell(text, spread, mean=summary.mean, std=summary.std, seeds=summary.count)


def embolden(cells: dict[str, list[Cell]], column: int) -> None:
    """Make the lowest mean of a column bold, among the cells with the most seeds there.

    A mean over fewer seeds is a mean over other runs, so it cannot win. Means that print alike
    are still told apart.
    """
    column_cells = [row[column] for row in cells.values() if row[column].mean is not None]
    most = max((cell.seeds for cell in column_cells), default=0)
    full = [cell.mean for cell in column_cells if cell.seeds == most and cell.mean is not None]
    for row in cells.values():
        if full and row[column].seeds == most and row[column].mean == min(full):
            row[column] = replace(row[column], bold=True)
