"""The table of differences: a line for each method and length, against a reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_patches.analysis.aggregate import (
    Group,
    collect,
    configurations,
    only,
    provenance,
)
from megatron_patches.analysis.cells import problem_cell, reasons, remark_marks, short_marks
from megatron_patches.analysis.differences import SHARED, Difference, differences
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
from megatron_patches.analysis.rows import Row
from megatron_patches.analysis.statistics import ALPHA, RESAMPLES, PairedTest, holm
from megatron_patches.analysis.validate import SEEDED_WINDOWS

LEVEL = f"{100 * (1 - ALPHA):g}%"
COLUMNS = (
    *("Δ loss", "seeds", "perplexity ratio", f"{LEVEL} over seeds", "p", "p, Holm"),
    *(f"{LEVEL} over text", "sd of seeds", "sd of text"),
)
WHAT = (
    "Δ loss: mean over common seeds of loss - loss of {reference}, nats per token; "
    "perplexity ratio: exp(Δ loss)"
)
SPREADS_NOTE = (
    "sd of seeds: of Δ loss from one training seed to the next, on this text (n - 1); sd of text: of "
    "the mean Δ loss from one sample of as much text to the next, with these seeds, from its blocks"
)
# Shares measured on 2,500 samples of independent normal blocks; a test repeats it.
ROUGH = (
    20,
    "rough and too narrow: of 16 normal blocks such an interval holds the true mean 92% of the time, "
    "of 8 87%, of 4 80%, of 2 50%",
)


def differences_table(
    rows: Iterable[Row], *, reference: str = REFERENCE, methods: Sequence[str] | None = None
) -> Table:
    """A line for each method and length; positive differences mean that ``reference`` is better.

    p is the paired t-test of losses over seeds; its Holm correction is over all tests of the table.
    With one seed only the bootstrap over text is possible, and a note says so. Lines without a common
    seed say why. ``methods`` selects and orders (the reference is needed among them). RowError: see
    ``differences``.
    """
    chosen = only(rows, methods)
    found = differences(chosen, reference)
    series = collect(chosen)
    tested = [d.test.p_value for d in found if d.test and d.test.p_value is not None]
    corrected = iter(holm(tested))
    expected = len({row.seed for row in chosen})
    notes = Notes()
    lines = []
    for item in found:
        ours, theirs = series[item.label][item.length], series[reference].get(item.length)
        if item.test is None:
            cells = _no_cells(item.length, ours, theirs, reference, notes)
        else:
            again = None if item.test.p_value is None else next(corrected)
            cells = _cells(item, item.test, again, notes)
            causes = reasons(ours, item.length) + [
                (f"{reference} {status}", message)
                for status, message in reasons(theirs, item.length)
            ]
            short = short_marks(len(item.seeds), expected, causes, notes)
            said = remark_marks([ours, theirs], notes)
            cells = (replace(cells[0], marks=said), *cells[1:])
            cells = (cells[0], replace(cells[1], marks=short), *cells[2:])
        lines.append((f"{item.label}, {item.length}", cells))
    used = {mark for _, cells in lines for cell in cells for mark in cell.marks}
    return Table(
        title=f"Differences from {reference}, {chosen[0].dataset}",
        corner="method, length",
        columns=COLUMNS,
        rows=tuple(lines),
        header=(*provenance(chosen), configurations(chosen), WHAT.format(reference=reference)),
        notes=(*_explained(found, chosen, reference, used), *notes.lines()),
    )


def _no_cells(
    length: int, ours: Group, theirs: Group | None, reference: str, notes: Notes
) -> tuple[Cell, ...]:
    """The line of a method that shares no scored seed with the reference: why."""
    rest = (Cell(ABSENT),) * (len(COLUMNS) - 1)
    if not ours.perplexities:
        return problem_cell(ours, length, notes), *rest
    if theirs is not None and theirs.perplexities:
        seeds = [" ".join(map(str, sorted(group.perplexities))) for group in (ours, theirs)]
        why = [f"no common seed: {seeds[0]}, of {reference} {seeds[1]}"]
    else:
        told = reasons(theirs, length) or [("not scored", "no rows at this length")]
        why = [f"{reference} {status}: {message}" for status, message in told]
    return Cell(ABSENT, marks=tuple(notes.mark(text) for text in why)), *rest


def _cells(
    item: Difference, test: PairedTest, corrected: float | None, notes: Notes
) -> tuple[Cell, ...]:
    why = (notes.mark(test.note),) if test.note else ()
    windows = (notes.mark(item.problem),) if item.problem else ()
    drawn: tuple[str, ...] = ()
    if item.drawn and item.spread is not None:
        drawn = (notes.mark("each seed draws its own windows: of seeds and windows at once"),)
    ratio = math.exp(test.difference)
    return (
        replace(_number(test.difference, "+.4f"), seeds=test.count),
        Cell(str(test.count), mean=float(test.count)),
        Cell(format_number(ratio, 4), mean=ratio),
        replace(_interval(test.interval), marks=why),
        replace(_number(test.p_value, ".3g"), marks=_marks(test, test.p_value)),
        replace(_number(corrected, ".3g"), marks=_marks(test, corrected)),
        replace(_interval(item.interval), marks=windows),
        replace(_number(item.spread, ".4f"), marks=drawn),
        replace(_number(item.text, ".4f"), marks=windows if item.problem == SHARED else ()),
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


def _explained(
    found: Sequence[Difference], rows: Sequence[Row], reference: str, used: set[str]
) -> list[str]:
    tests = [item.test for item in found if item.test is not None]
    if not tests:
        return [f"nothing to compare: no other method shares a length and a seed with {reference}"]
    counts = sorted({test.count for test in tests})
    possible = sum(test.p_value is not None for test in tests)
    lines = ["no test over seeds is possible here, only the bootstrap over text"]
    if possible:
        lines = [
            f"p: paired two-sided t-test of losses over seeds ({' or '.join(map(str, counts))} "
            f"seeds); Holm: corrected over this table, tests: {possible}"
        ]
    if BETTER_THAN_CELL in used:
        lines.append(f"{BETTER_THAN_CELL} {reference} is significantly better, p < {ALPHA}")
    if CELL_BETTER in used:
        lines.append(f"{CELL_BETTER} significantly better than {reference}, p < {ALPHA}")
    return [*lines, *_of_text(found, rows), SPREADS_NOTE]


def _of_text(found: Sequence[Difference], rows: Sequence[Row]) -> list[str]:
    """What the intervals over text are made of; nothing where there is none."""
    counts = sorted({item.blocks for item in found if item.interval is not None})
    if not counts:
        return []
    longest = max(row.eval_length for row in rows)
    what = f"{' or '.join(map(str, counts))} blocks of consecutive windows, {longest:,} tokens each"
    if rows[0].protocol in SEEDED_WINDOWS:
        what = f"{' or '.join(map(str, counts))} windows, which were drawn one by one"
    least, warning = ROUGH
    rough = f"; {warning}" if counts[0] < least else ""
    how = f"paired bootstrap (BCa, {RESAMPLES} resamples) of the mean over seeds"
    if rows[0].protocol in SEEDED_WINDOWS:
        how = f"paired bootstrap (BCa, {RESAMPLES} resamples) of one seed"
    return [f"over text: {how}, from {what}{rough}"]
