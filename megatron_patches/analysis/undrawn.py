"""What a figure does not draw, and why: a missing point must not look like one nobody asked for.

And what rows say of the points that it draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_patches.analysis.aggregate import Series, series_label
from megatron_patches.analysis.jsonl import plain
from megatron_patches.analysis.rows import Row
from megatron_patches.analysis.training_rows import TrainingRow

NO_ROW = "no row"
NO_POSITIONS = "no losses by position"


@dataclass(frozen=True)
class Point:
    """How many seeds one label has at one length, and what the others say (``failed: why``)."""

    seeds: int
    reasons: frozenset[str] = frozenset()


Coverage = Mapping[str, Mapping[int, Point]]  # label -> length in tokens -> point


def perplexity_notes(series: Series, seeds: int) -> list[str]:
    """Notes on the cells of ``series`` that have no perplexity, or one of fewer than ``seeds``, and what
    rows say of the others."""
    lengths = sorted({length for groups in series.values() for length in groups})
    found: dict[str, dict[int, Point]] = {}
    for label, groups in series.items():
        found[label] = {
            length: Point(0, frozenset([NO_ROW]))
            if length not in groups
            else Point(
                len(groups[length].perplexities),
                frozenset(_reason(*why, length) for why in groups[length].problems.values()),
            )
            for length in lengths
        }
    said = {
        (length, text)
        for groups in series.values()
        for length, group in groups.items()
        for text in group.remarks.values()
    }
    return notes(found, seeds) + _remarks(said)


def position_notes(rows: Iterable[Row], length: int) -> list[str]:
    """Notes on labels whose rows of this length have no losses by position, or too few of them, and what
    rows say of the others."""
    own = [row for row in rows if row.eval_length == length]
    by_label: dict[str, list[Row]] = {}
    for row in sorted(own, key=series_label):
        by_label.setdefault(series_label(row), []).append(row)
    found = {}
    for label, several in by_label.items():
        without = [row for row in several if not row.position_losses]
        reasons = frozenset(
            NO_POSITIONS if row.status == "ok" else _reason(row.status, row.message or "", length)
            for row in without
        )
        found[label] = {length: Point(len(several) - len(without), reasons)}
    said = {(length, row.message) for row in own if row.position_losses and row.message}
    return notes(found, len({row.seed for row in own})) + _remarks(said)


def _remarks(said: Iterable[tuple[int, str]]) -> list[str]:
    """A line for each text, with the lengths that it is said of."""
    lengths: dict[str, list[str]] = {}
    for length, text in sorted(said):
        lengths.setdefault(plain(text), []).append(str(length))
    return [f"at {', '.join(where)}: {text}" for text, where in lengths.items()]


def _reason(status: str, message: str, length: int) -> str:
    # What a method says of each length beyond its last is one note.
    return plain(f"{status}: {message}").replace(f" {length} tokens", " this many tokens")


def notes(found: Coverage, seeds: int) -> list[str]:
    """At most two lines: points that are not drawn, and points of fewer than ``seeds`` seeds."""
    absent: dict[str, list[str]] = {}
    fewer: dict[str, list[str]] = {}  # what is said -> labels
    for label, points in found.items():
        groups: dict[Point, list[int]] = {}
        for length, point in points.items():
            if point.seeds < seeds:
                groups.setdefault(point, []).append(length)
        for point, lengths in groups.items():
            where = "" if len(lengths) == len(points) else f" at {', '.join(map(str, lengths))}"
            why = "; ".join(sorted(point.reasons))
            if not point.seeds:
                absent.setdefault(f"{where} ({why or NO_ROW})", []).append(label)
            else:
                said = f"{where}: {point.seeds} of {seeds} seeds" + (why and f" ({why})")
                fewer.setdefault(said, []).append(label)
    return _line("not drawn", absent) + _line("fewer seeds", fewer)


def _line(word: str, found: Mapping[str, Sequence[str]]) -> list[str]:
    """What is said of several labels at once is said once."""
    parts = [f"{', '.join(labels)}{said}" for said, labels in found.items()]
    return [f"{word}: {'; '.join(parts)}"] if parts else []


def training_notes(rows: Sequence[TrainingRow]) -> list[str]:
    """Notes on the runs that were not completed, and on labels with fewer seeds than the others."""
    failed = [
        f"{series_label(row)}, seed {row.seed} ({row.status} after {row.step} steps: {row.message})"
        for row in rows
        if row.status != "ok"
    ]
    seeds = len({row.seed for row in rows})
    done: dict[str, int] = {}
    for row in rows:
        label = series_label(row)
        done[label] = done.get(label, 0) + (row.status == "ok")
    fewer: dict[str, list[str]] = {}
    for label, count in done.items():
        if 0 < count < seeds:
            fewer.setdefault(f": {count} of {seeds} seeds", []).append(label)
    lines = [f"not drawn: {'; '.join(failed)}"] if failed else []
    return lines + _line("fewer seeds", fewer)
