"""Ours beside the published value with the difference: perplexities of like models, else trends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_patches.analysis.aggregate import collect, configurations, only, provenance
from megatron_patches.analysis.cells import group_cell, seed_line
from megatron_patches.analysis.layout import ABSENT, Cell, Notes, Table
from megatron_patches.analysis.published import PublishedRow, query
from megatron_patches.analysis.rows import MAX_SIZE_RATIO, Row, RowError
from megatron_patches.analysis.tables import check_whole_windows, minus, relative_table

UNITS = {"M": 10**6, "B": 10**9}


def parameters_of(model: str) -> float:
    """Parameters of a model that a paper names by its size: ``162M``, ``1.3B``; RowError for others."""
    try:
        return float(model[:-1]) * UNITS[model[-1:]]
    except (KeyError, ValueError):
        raise RowError(f"model {model!r} of the published figures: no size such as 162M") from None


def same_question(rows: Sequence[Row], published: Sequence[PublishedRow]) -> bool:
    """Whether perplexities may stand side by side: one data set, training length and size of model."""
    first, theirs = rows[0], published[0]
    if (first.dataset, first.train_length) != (theirs.dataset, theirs.train_length):
        return False
    sizes = [parameters_of(theirs.model), *(row.parameters for row in rows)]
    return max(sizes) <= MAX_SIZE_RATIO * min(sizes)


def comparison_table(
    rows: Iterable[Row],
    published: Sequence[PublishedRow],
    *,
    methods: Sequence[str] | None = None,
) -> Table:
    """Three lines a method: ours, the paper's, and ours minus the paper's.

    Perplexities where the rows are of the paper's data set, training length and size of model (within
    MAX_SIZE_RATIO); else perplexity relative to that at the training length. ``published``: see
    ``tables.published_rows``. RowError for rows of a protocol that does not score whole windows.
    """
    chosen = only(rows, methods)
    check_whole_windows(chosen)
    if not same_question(chosen, published):
        return relative_table(chosen, published, methods=methods, differences=True)
    series = collect(chosen, methods)
    notes, expected = Notes(), len({row.seed for row in chosen})
    source = f"{published[0].paper} {published[0].table}"
    lines: list[tuple[str, dict[int, Cell]]] = []
    for label, groups in series.items():
        ours = {n: group_cell(group, n, expected, notes) for n, group in groups.items()}
        theirs = {row.eval_length: _printed(row, notes) for row in query(published, method=label)}
        lines.append((f"{label}, ours", ours))
        if theirs:
            apart = {n: minus(ours[n], theirs[n]) for n in ours if n in theirs}
            lines += [(f"{label}, {source}", theirs), (f"{label}, difference", apart)]
    lengths = sorted({length for _, cells in lines for length in cells})
    return Table(
        title=f"Perplexity beside {source}, {chosen[0].dataset}",
        corner="method",
        columns=tuple(map(str, lengths)),
        rows=tuple((n, tuple(c.get(length, Cell(ABSENT)) for length in lengths)) for n, c in lines),
        header=(
            *provenance(chosen),
            configurations(chosen),
            seed_line(expected),
            f"published: {published[0].model} parameters, trained on {published[0].train_length} "
            "tokens; difference: ours minus published, of unrounded means of ours",
        ),
        notes=notes.lines(),
    )


def _printed(row: PublishedRow, notes: Notes) -> Cell:
    """A published figure with its digits."""
    marks = (notes.mark(row.note),) if row.note else ()
    return Cell(row.value_text or ABSENT, row.std_text, marks, mean=row.value, std=row.std)
