"""Retrieval rows by method, length and depth: what heat maps, tables and the report have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_patches.analysis.aggregate import series_label, shorten
from megatron_patches.analysis.jsonl import RowError, UsageError
from megatron_patches.analysis.layout import format_number
from megatron_patches.analysis.retrieval_rows import (
    COMPARED_FIELDS,
    RetrievalRow,
    check_retrieval_comparable,
    latest_retrieval,
)
from megatron_patches.analysis.statistics import ALPHA, Summary, summarize

# What can be drawn, with its name in titles.
VALUES = {
    "gain": "Gain over the control (nats per answer token)",
    "token_accuracy": "Share of answer tokens that are the likeliest",
    "exact": "Share of answers that are right as a whole",
}


@dataclass
class Square:
    """One method at one length and depth: by seed, a row with scores or a reason for having none."""

    rows: dict[int, RetrievalRow] = field(default_factory=dict)
    problems: dict[int, tuple[str, str]] = field(default_factory=dict)  # status, message

    def mean(self, value: str) -> float | None:
        """Mean of one of VALUES over the seeds; None without any."""
        if not self.rows:
            return None
        return summarize(getattr(row, value) for row in self.rows.values()).mean

    @property
    def status(self) -> str:
        """The statuses of a square without scores, as in ``refused``."""
        return "/".join(sorted({status for status, _ in self.problems.values()}))

    def seeds_of(self, expected: int) -> str:
        """``1/3`` where there are scores of fewer seeds than ``expected``, else nothing."""
        count = len(self.rows)
        return f"{count}/{expected}" if 0 < count < expected else ""


# label -> (length in tokens, depth) -> square
Grid = dict[str, dict[tuple[int, float], Square]]


def questions(rows: Iterable[RetrievalRow]) -> list[list[RetrievalRow]]:
    """Rows that asked the same, together; sorted by what they asked."""
    groups: dict[tuple[str, ...], list[RetrievalRow]] = {}
    for row in rows:
        key = tuple(str(getattr(row, name)) for name in COMPARED_FIELDS)
        groups.setdefault(key, []).append(row)
    return [groups[key] for key in sorted(groups)]


def title(row: RetrievalRow) -> str:
    """What the rows of one question have in common: ``copy (text), local_code, trained on 512``."""
    name = f"{row.task} ({row.source}), {row.dataset}, trained on {row.train_length}"
    return name + ("" if row.split == "valid" else f", split {row.split}")


def collect_retrieval(rows: Iterable[RetrievalRow], methods: Sequence[str] | None = None) -> Grid:
    """The latest row of each cell by label, length and depth, checked; sorted, or as listed.

    RowError when there are no rows, when they may not meet, when two configurations claim one cell,
    or when a listed method has no rows.
    """
    kept = latest_retrieval(rows)
    if methods is not None:
        absent = [method for method in methods if method not in {row.method for row in kept}]
        if absent:
            raise UsageError(f"no rows of {', '.join(absent)}")
        kept = [row for method in dict.fromkeys(methods) for row in kept if row.method == method]
    if not kept:
        raise RowError("no rows: nothing to show")
    check_retrieval_comparable(kept)
    origin: dict[tuple[str, int], str] = {}
    grid: Grid = {}
    for row in kept:
        label = series_label(row)
        before = origin.setdefault((label, row.seed), row.config_sha)
        if before != row.config_sha:
            raise RowError(
                f"{label}, seed {row.seed}: results of two configurations ({before} and "
                f"{row.config_sha}); choose one with config_sha"
            )
        square = grid.setdefault(label, {}).setdefault((row.eval_length, row.depth), Square())
        if row.status == "ok":
            square.rows[row.seed] = row
        else:
            square.problems[row.seed] = (row.status, row.message or "")
    return {label: grid[label] for label in (grid if methods is not None else sorted(grid))}


def axes_of(grid: Grid) -> tuple[list[int], list[float]]:
    """All lengths and all depths of a grid, ascending."""
    keys = {key for squares in grid.values() for key in squares}
    return sorted({length for length, _ in keys}), sorted({depth for _, depth in keys})


def seeds_in(grid: Grid) -> int:
    """How many seeds there are in a grid, with and without scores."""
    squares = (square for line in grid.values() for square in line.values())
    return len({seed for square in squares for seed in (*square.rows, *square.problems)})


def short_notes(grid: Grid) -> list[str]:
    """One line on the squares with scores of fewer seeds than there are; none where all have all."""
    expected, found = seeds_in(grid), dict[tuple[str, str], dict[int, None]]()
    for label, line in grid.items():
        for (length, _), square in sorted(line.items()):
            if square.seeds_of(expected):
                told = sorted({f"{status}: {why}" for status, why in square.problems.values()})
                missing = expected - len(square.rows) - len(square.problems)
                why = "; ".join([*told, *(["no row"] if missing else [])])
                found.setdefault((label, why), {})[length] = None
    cells = [
        f"{label} at {', '.join(map(str, lengths))} ({why})"
        for (label, why), lengths in found.items()
    ]
    return [f"fewer than {expected} seeds: {'; '.join(cells)}"] if cells else []


def decimals_for(values: Iterable[float]) -> int:
    """Decimals for a whole table or figure; gains of small models need the fourth."""
    return 3 if max((abs(value) for value in values), default=0.0) >= 1 else 4


def shown(value: float, places: int) -> str:
    """A number as printed, without a minus sign where nothing is left of it."""
    text = format_number(value, places)
    return text.lstrip("-") if float(text) == 0 else text


def over_depths(
    squares: dict[tuple[int, float], Square], length: int, depths: Sequence[float], value: str
) -> tuple[dict[int, float], dict[int, str]]:
    """By seed: the mean of ``value`` over all ``depths``, or why there is none."""
    at = [squares.get((length, depth), Square()) for depth in depths]
    seeds = sorted({seed for square in at for seed in (*square.rows, *square.problems)})
    means, reasons = {}, {}
    for seed in seeds:
        found = [getattr(square.rows[seed], value) for square in at if seed in square.rows]
        if len(found) == len(depths):
            means[seed] = math.fsum(found) / len(found)
            continue
        problems = {square.problems[seed] for square in at if seed in square.problems}
        why = "; ".join(f"{status}: {message}" for status, message in sorted(problems))
        reasons[seed] = why or f"{len(found)} of {len(depths)} depths"
    return means, reasons


def half_interval(summary: Summary) -> float | None:
    """Half the width of the two-sided 95 % confidence interval of a mean; None for one value."""
    if summary.std is None:
        return None

    from scipy import stats

    quantile = float(stats.t.ppf(1 - ALPHA / 2, summary.count - 1))
    return quantile * summary.std / math.sqrt(summary.count)


def retrieval_provenance(rows: Iterable[RetrievalRow]) -> list[str]:
    """Lines that say what was asked and of what, for the head of a table or the foot of a figure."""
    kept = latest_retrieval(rows)
    first = kept[0]

    def listed(name: str) -> str:
        return " ".join(shorten(str(v)) for v in sorted({getattr(row, name) for row in kept}))

    sizes = sorted({row.parameters for row in kept})
    size = f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "")
    depths = ", ".join(f"{depth:g}" for depth in sorted({row.depth for row in kept}))
    return [
        f"task {first.task} ({first.source}), dataset {first.dataset}, split {first.split}, depths "
        f"{depths}, {first.samples} questions of {first.answer_tokens} answer tokens a cell",
        f"{size} parameters, trained on {first.train_length} tokens for {first.step} steps, seeds "
        f"{listed('seed')}",
        f"engine {listed('engine')}, attention {listed('attention')}, {first.dtype}",
        f"data {shorten(first.data)}, tokenizer {shorten(first.tokenizer)}, questions "
        f"{shorten(first.questions)}",
        f"commit {listed('git_sha')}",
    ]
