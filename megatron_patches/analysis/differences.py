"""The table of differences: each method against a reference, with what is known of their size.

Losses (nats per token) are compared, pair by pair: the same seed, the same windows. Their mean
difference is the logarithm of a ratio of perplexities, which stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_patches.analysis.aggregate import (
    collect,
    comparable_rows,
    configurations,
    only,
    provenance,
    series_label,
)
from megatron_patches.analysis.layout import (
    ABSENT,
    BETTER_THAN_CELL,
    CELL_BETTER,
    Cell,
    Notes,
    Table,
    format_number,
)
from megatron_patches.analysis.published import REFERENCE
from megatron_patches.analysis.rows import Row, RowError
from megatron_patches.analysis.statistics import (
    ALPHA,
    RESAMPLES,
    PairedTest,
    Spreads,
    bootstrap_interval,
    holm,
    paired_test,
    spreads,
)
from megatron_patches.analysis.validate import SEEDED_WINDOWS

LEVEL = f"{100 * (1 - ALPHA):g}%"
COLUMNS = (
    *("Δ loss", "perplexity ratio", f"{LEVEL} over seeds", "p", "p, Holm"),
    *(f"{LEVEL} over windows", "sd of seeds", "sd of text"),
)
WHAT = (
    "Δ loss: mean over common seeds of loss - loss of {reference}, nats per token; "
    "perplexity ratio: exp(Δ loss)"
)
SPREADS_NOTE = (
    "sd of Δ loss: from one training seed to the next on this text, and from one sample of as many "
    "windows to the next with these seeds (two-way random effects)"
)


@dataclass(frozen=True)
class Difference:
    """``label`` minus the reference at one length; ``seed`` is the one whose windows are drawn."""

    label: str
    length: int
    test: PairedTest
    seed: int
    bootstrap: tuple[float, float] | None
    spreads: Spreads | None
    problem: str | None = None  # why there is nothing over windows


def differences(rows: Iterable[Row], reference: str = REFERENCE) -> list[Difference]:
    """Each label but ``reference`` at each length that both have scored, with a common seed.

    RowError when rows may not meet, or none of them is of ``reference``.
    """
    kept = comparable_rows(rows)
    labels = list(collect(kept))
    if reference not in labels:
        raise RowError(
            f"no rows of {reference} to compare with; --reference can be {', '.join(labels)}"
        )
    cells: dict[tuple[str, int], dict[int, Row]] = {}
    for row in kept:
        if row.status == "ok":
            cells.setdefault((series_label(row), row.eval_length), {})[row.seed] = row
    found = []
    for label in labels:
        for length in sorted({row.eval_length for row in kept}):
            ours, theirs = cells.get((label, length), {}), cells.get((reference, length), {})
            if label != reference and ours.keys() & theirs.keys():
                found.append(_difference(label, length, ours, theirs))
    return found


def _difference(
    label: str, length: int, ours: dict[int, Row], theirs: dict[int, Row]
) -> Difference:
    seeds = sorted(ours.keys() & theirs.keys())
    losses = [{seed: _loss(rows[seed]) for seed in seeds} for rows in (ours, theirs)]
    test = paired_test(*losses)
    if not all(_means_agree(rows[seed]) for rows in (ours, theirs) for seed in seeds):
        problem = "windows of unequal size: no statistics over windows"
        return Difference(label, length, test, seeds[0], None, None, problem)
    by_seed = [
        [a - b for a, b in zip(ours[s].window_losses, theirs[s].window_losses, strict=True)]
        for s in seeds
    ]
    first = seeds[0]
    interval = bootstrap_interval(ours[first].window_losses, theirs[first].window_losses)
    problem = None if interval else "one window, or no spread over windows: no bootstrap"
    # Windows that differ from seed to seed have no spread apart from the seeds'.
    crossed = ours[first].protocol not in SEEDED_WINDOWS
    spread = spreads(by_seed) if crossed else None
    return Difference(label, length, test, first, interval, spread, problem)


def _loss(row: Row) -> float:
    assert row.loss is not None  # status is "ok"
    return row.loss


def _means_agree(row: Row) -> bool:
    """Whether every window counts alike: not under a protocol that scores unequal numbers."""
    mean = math.fsum(row.window_losses) / len(row.window_losses)
    return abs(mean - _loss(row)) <= 1e-5 * max(1.0, _loss(row))


def differences_table(
    rows: Iterable[Row], *, reference: str = REFERENCE, methods: Sequence[str] | None = None
) -> Table:
    """A line for each method and length; positive differences mean that ``reference`` is better.

    p is the paired t-test over seeds; its Holm correction is over all tests of the table. With one
    seed only the bootstrap over windows is possible, and a note says so. ``methods`` selects and
    orders (the reference is needed among them). RowError: see ``differences``.
    """
    chosen = only(rows, methods)
    found = differences(chosen, reference)
    tested = [d.test.p_value for d in found if d.test.p_value is not None]
    corrected = iter(holm(tested))
    notes = Notes()
    lines = []
    for item in found:
        again = None if item.test.p_value is None else next(corrected)
        lines.append((f"{item.label}, {item.length}", _cells(item, again, notes)))
    used = {mark for _, cells in lines for cell in cells for mark in cell.marks}
    return Table(
        title=f"Differences from {reference}, {chosen[0].dataset}",
        corner="method, length",
        columns=COLUMNS,
        rows=tuple(lines),
        header=(*provenance(chosen), configurations(chosen), WHAT.format(reference=reference)),
        notes=(*_explained(found, reference, len(tested), used), *notes.lines()),
    )


def _cells(item: Difference, corrected: float | None, notes: Notes) -> tuple[Cell, ...]:
    test = item.test
    why = (notes.mark(test.note),) if test.note else ()
    windows = (notes.mark(item.problem),) if item.problem else ()
    both = item.spreads or Spreads(None, None)
    ratio = math.exp(test.difference)
    return (
        replace(_number(test.difference, "+.4f"), seeds=test.count),
        Cell(format_number(ratio, 4), mean=ratio),
        replace(_interval(test.interval), marks=why),
        replace(_number(test.p_value, ".3g"), marks=_marks(test, test.p_value)),
        replace(_number(corrected, ".3g"), marks=_marks(test, corrected)),
        replace(_interval(item.bootstrap), marks=windows),
        _number(both.seeds, ".4f"),
        _number(both.windows, ".4f"),
    )


def _marks(test: PairedTest, p_value: float | None) -> tuple[str, ...]:
    if p_value is None or p_value >= test.alpha:
        return ()
    return (CELL_BETTER if test.difference < 0 else BETTER_THAN_CELL,)


def _number(value: float | None, form: str) -> Cell:
    return Cell(ABSENT) if value is None else Cell(format(value, form), mean=value)


def _interval(ends: tuple[float, float] | None) -> Cell:
    if ends is None:
        return Cell(ABSENT)
    return Cell(f"{ends[0]:+.4f} to {ends[1]:+.4f}", interval=ends)


def _explained(found: list[Difference], reference: str, tests: int, used: set[str]) -> list[str]:
    if not found:
        return [f"nothing to compare: no other method shares a length and a seed with {reference}"]
    seeds = sorted({item.test.count for item in found})
    lines = [f"p: paired two-sided t-test over seeds ({' or '.join(map(str, seeds))} seeds)"]
    if tests:
        lines[0] += f"; Holm: corrected over this table, tests: {tests}"
    else:
        lines = ["no test over seeds is possible here, only the bootstrap over windows"]
    if BETTER_THAN_CELL in used:
        lines.append(f"{BETTER_THAN_CELL} {reference} is significantly better, p < {ALPHA}")
    if CELL_BETTER in used:
        lines.append(f"{CELL_BETTER} significantly better than {reference}, p < {ALPHA}")
    drawn = " ".join(str(seed) for seed in sorted({item.seed for item in found}))
    lines.append(
        f"over windows: paired bootstrap (BCa, {RESAMPLES} resamples) of the windows of seed {drawn}"
    )
    return [*lines, SPREADS_NOTE]
