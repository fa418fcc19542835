"""Ours beside the published value with the difference: perplexities of like models, else trends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_patches.analysis.aggregate import (
    collect,
    configurations,
    only,
    provenance,
    shorten,
)
from megatron_patches.analysis.cells import group_cell, seed_line
from megatron_patches.analysis.layout import ABSENT, Cell, Notes, Table
from megatron_patches.analysis.published import PublishedRow, query
from megatron_patches.analysis.rows import MAX_SIZE_RATIO, Row, RowError
from megatron_patches.analysis.tables import check_whole_windows, minus, relative_table

UNITS = {"M": 10**6, "B": 10**9}
# Training steps, by paper and model: KERPLE, tables 2 and 8; one step is 32 sequences. These models
# read GPT-2's vocabulary. Another cut into tokens has other losses a token.
STEPS = {("KERPLE", "162M"): 50_000, ("KERPLE", "1.3B"): 150_000}
GPT2 = "c9c1848c204159d7"  # fingerprint of the tokenizer
MAX_STEPS_RATIO = 1.1


def parameters_of(model: str) -> float:
    """Parameters of a model that a paper names by its size: ``162M``, ``1.3B``; RowError for others."""
    try:
        return float(model[:-1]) * UNITS[model[-1:]]
    except (KeyError, ValueError):
        raise RowError(f"model {model!r} of the published figures: no size such as 162M") from None


def same_question(rows: Sequence[Row], published: Sequence[PublishedRow]) -> bool:
    """Whether perplexities may stand side by side; see ``unlike``."""
    return not unlike(rows, published)


def unlike(rows: Sequence[Row], published: Sequence[PublishedRow]) -> list[str]:
    """Why perplexities of rows of one question may not stand beside published ones: a text a reason.

    Data set, training length (tokens) and tokenizer have to be the paper's, parameters within
    MAX_SIZE_RATIO of its model's and training steps within MAX_STEPS_RATIO of its own. Rows do not say
    how many sequences a step had. RowError for a published model without a size.
    """
    first, theirs = rows[0], published[0]
    size, steps = parameters_of(theirs.model), STEPS.get((theirs.paper, theirs.model))
    sizes = [size, *(row.parameters for row in rows)]
    told = {
        f"data set {first.dataset}, theirs {theirs.dataset}": first.dataset == theirs.dataset,
        f"trained on {first.train_length} tokens, theirs {theirs.train_length}": (
            first.train_length == theirs.train_length
        ),
        f"{first.parameters:,} parameters, theirs {theirs.model}": (
            max(sizes) <= MAX_SIZE_RATIO * min(sizes)
        ),
    }
    if steps is None:
        told[f"tokenizer and training steps of {theirs.paper}, {theirs.table} are not known"] = (
            False
        )
    else:
        told[f"tokenizer {shorten(first.tokenizer)}, theirs {GPT2} (GPT-2's)"] = (
            first.tokenizer == GPT2
        )
        told[f"{first.step:,} training steps, theirs {steps:,}"] = max(
            first.step, steps
        ) <= MAX_STEPS_RATIO * min(first.step, steps)
    return [reason for reason, fits in told.items() if not fits]


def comparison_table(
    rows: Iterable[Row],
    published: Sequence[PublishedRow],
    *,
    methods: Sequence[str] | None = None,
) -> Table:
    """Three lines a method: ours, the paper's, and ours minus the paper's.

    Perplexities where the rows are of the paper's data set, training length, size of model, tokenizer
    and training steps (see ``unlike``); else perplexity relative to that at the training length, and a
    note says what differs. ``published``: see ``tables.published_rows``. RowError for rows of a protocol
    that does not score whole windows.
    """
    chosen = only(rows, methods)
    check_whole_windows(chosen)
    reasons = unlike(chosen, published)
    if reasons:
        table = relative_table(chosen, published, methods=methods, differences=True)
        caveat, *others = table.notes
        return replace(table, notes=(caveat, f"Here: {'; '.join(reasons)}.", *others))
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
