"""Tables as pure functions of rows: perplexity by length, the published one, and the trend.

A table is plain data (``layout.Table``); ``render`` turns it into Markdown, LaTeX or CSV.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from megatron_patches.analysis.aggregate import (
    Group,
    Series,
    collect,
    configurations,
    only,
    provenance,
)
from megatron_patches.analysis.cells import (
    group_cell,
    problem_cell,
    reasons,
    remark_marks,
    seed_line,
    short_marks,
)
from megatron_patches.analysis.layout import (
    ABSENT,
    BETTER_THAN_CELL,
    CELL_BETTER,
    Cell,
    Notes,
    Table,
    embolden,
    number_cell,
)
from megatron_patches.analysis.published import (
    REFERENCE,
    PublishedRow,
    published_ratio,
    query,
)
from megatron_patches.analysis.rows import WHOLE_WINDOW, Row, RowError
from megatron_patches.analysis.statistics import ALPHA, Summary, paired_test, summarize

NOT_ABSOLUTE = (
    "Absolute perplexities depend on model size, training budget, tokenizer and text, so only the "
    "trend over length can be compared with the published figures."
)


def extrapolation_table(
    rows: Iterable[Row],
    *,
    reference: str = REFERENCE,
    methods: Sequence[str] | None = None,
    title: str | None = None,
) -> Table:
    """Perplexity of each method (down) at each length (across), mean ± std over seeds.

    The best mean of a column is bold. Where ``reference`` (a label of the table) is there with two
    seeds or more, a dagger marks cells that it beats significantly and a double dagger cells that
    beat it. ``methods`` selects and orders. RowError when rows may not meet in one table.
    """
    chosen = only(rows, methods)
    series = collect(chosen, methods)
    lengths = sorted({length for groups in series.values() for length in groups})
    seeds = {row.seed for row in chosen}
    notes = Notes()
    cells = {
        label: [group_cell(groups.get(length), length, len(seeds), notes) for length in lengths]
        for label, groups in series.items()
    }
    significance = _mark_significance(series, cells, lengths, reference)
    for column in range(len(lengths)):
        embolden(cells, column)
    return Table(
        title=title or f"Perplexity by evaluation length, {chosen[0].dataset}",
        corner="method",
        columns=tuple(str(length) for length in lengths),
        rows=tuple((label, tuple(row)) for label, row in cells.items()),
        header=(*provenance(chosen), configurations(chosen), seed_line(len(seeds))),
        notes=(*significance, *notes.lines()),
    )


def _mark_significance(
    series: Series, cells: dict[str, list[Cell]], lengths: list[int], reference: str
) -> list[str]:
    """Put the marks of the paired test into ``cells``; the lines that explain them."""
    base = series.get(reference)
    if base is None:
        return [f"no test: there are no rows of {reference} to test against"]
    used: set[str] = set()
    tested = 0
    for label, groups in series.items():
        for column, length in enumerate(lengths):
            if label == reference or length not in base or length not in groups:
                continue
            ours, theirs = base[length].perplexities, groups[length].perplexities
            if not ours.keys() & theirs.keys():
                continue
            test = paired_test(ours, theirs)
            tested += test.p_value is not None
            mark = BETTER_THAN_CELL if test.first_lower else CELL_BETTER
            if test.first_lower or test.second_lower:
                used.add(mark)
                cell = cells[label][column]
                cells[label][column] = replace(cell, marks=(mark, *cell.marks))
    if not tested:
        return ["no test: it needs two common seeds and a spread over them"]
    how = (
        f"paired two-sided t-test of perplexities over seeds, as in the paper, p < {ALPHA}, cells "
        f"tested: {tested}, not corrected"
    )
    lines = {
        BETTER_THAN_CELL: f"{BETTER_THAN_CELL} {reference} is significantly better ({how})",
        CELL_BETTER: f"{CELL_BETTER} significantly better than {reference} ({how})",
    }
    return [lines[mark] for mark in sorted(used)] or [f"no significant difference ({how})"]


def published_table(
    published: Iterable[PublishedRow],
    *,
    table: str,
    dataset: str,
    paper: str = "KERPLE",
    model: str | None = None,
    train_length: int | None = None,
) -> Table:
    """A paper's table in the shape of ``extrapolation_table``, digits as printed.

    RowError when nothing matches, or when several models or training lengths do.
    """
    found = published_rows(published, table, dataset, paper, model, train_length)
    lengths = sorted({row.eval_length for row in found})
    notes = Notes()
    grid = {row.method: [Cell(ABSENT)] * len(lengths) for row in found}
    for row in found:
        marks: tuple[str, ...] = (BETTER_THAN_CELL,) if row.log_significantly_better else ()
        if row.note:
            marks += (notes.mark(row.note),)
        cell = Cell(row.value_text or ABSENT, row.std_text, marks, mean=row.value, std=row.std)
        grid[row.method][lengths.index(row.eval_length)] = cell
    for column in range(len(lengths)):
        embolden(grid, column)
    first = found[0]
    dagger = f"{BETTER_THAN_CELL} {REFERENCE} is significantly better, as the paper marks it"
    return Table(
        title=f"Published: {paper}, {table}, {first.unit}, {dataset}",
        corner="method",
        columns=tuple(str(length) for length in lengths),
        rows=tuple((method, tuple(row)) for method, row in grid.items()),
        header=(f"{first.model} parameters, trained on {first.train_length} tokens",),
        notes=(
            *([dagger] if any(row.log_significantly_better for row in found) else []),
            *notes.lines(),
        ),
    )


def published_rows(
    published: Iterable[PublishedRow],
    table: str,
    dataset: str,
    paper: str = "KERPLE",
    model: str | None = None,
    train_length: int | None = None,
) -> list[PublishedRow]:
    """The figures of one published table for one data set, model and training length."""
    whole = query(published, paper=paper, table=table)
    found = query(whole, dataset=dataset, model=model, train_length=train_length)
    if not found:
        there = sorted({f"{r.dataset} ({r.model}, trained on {r.train_length})" for r in whole})
        asked = f"{paper} {table}, {dataset}, trained on {train_length or 'any'} tokens"
        raise RowError(f"nothing published for {asked}; there is {', '.join(there) or 'nothing'}")
    kinds = sorted({(row.model, row.train_length) for row in found})
    if len(kinds) > 1:
        raise RowError(f"{paper} {table}, {dataset}: choose one model and training length: {kinds}")
    return found


def relative_table(
    rows: Iterable[Row],
    published: Sequence[PublishedRow] = (),
    *,
    methods: Sequence[str] | None = None,
    differences: bool = False,
) -> Table:
    """Perplexity divided by that at the training length, ours above the published ratio.

    Columns are multiples of the training length, so that models trained at different lengths can
    be compared. Ours is the mean ± std of each seed's own ratio; published is the ratio of means
    (``published``: see ``published_rows``); ``differences`` adds ours minus published below them. Only
    methods that we have rows of are shown. RowError when published figures, which are of whole
    windows, would stand beside another protocol.
    """
    chosen = only(rows, methods)
    if published:
        check_whole_windows(chosen)
    series = collect(chosen, methods)
    trained, notes = chosen[0].train_length, Notes()
    expected = len({row.seed for row in chosen})
    source = f"{published[0].paper} {published[0].table}" if published else ""
    lines: list[tuple[str, Mapping[float, Cell]]] = []
    for label, groups in series.items():
        ours = _own_ratios(groups, trained, expected, notes)
        theirs = _published_ratios(published, label)
        lines.append((f"{label}, ours" if published else label, ours))
        lines += [(f"{label}, {source}", theirs)] if theirs else []
        apart = {m: minus(ours[m], theirs[m]) for m in ours if m in theirs} if differences else {}
        lines += [(f"{label}, difference", apart)] if apart else []
    multiples = sorted({multiple for _, ratios in lines for multiple in ratios})
    return Table(
        title=f"Perplexity relative to that at the training length, {chosen[0].dataset}",
        corner="length / training length",
        columns=tuple(f"×{multiple:g}" for multiple in multiples),
        rows=tuple((n, tuple(c.get(m, Cell(ABSENT)) for m in multiples)) for n, c in lines),
        header=(*provenance(chosen), configurations(chosen), seed_line(expected)),
        notes=(*([NOT_ABSOLUTE] if published else []), *notes.lines()),
    )


def check_whole_windows(rows: Iterable[Row]) -> None:
    """RowError for rows of a protocol that must not stand beside the papers' main tables."""
    others = sorted({row.protocol for row in rows} - set(WHOLE_WINDOW))
    if others:
        raise RowError(
            f"the published figures score every token of windows side by side, these rows are of "
            f"protocol {', '.join(others)}: choose {' or '.join(WHOLE_WINDOW)} with --where protocol="
        )


def _own_ratios(
    groups: Mapping[int, Group], train_length: int, expected: int, notes: Notes
) -> dict[float, Cell]:
    base = groups.get(train_length)
    return {
        length / train_length: _own_ratio(group, length, base, train_length, expected, notes)
        for length, group in groups.items()
    }


def _own_ratio(
    group: Group, length: int, base: Group | None, trained: int, expected: int, notes: Notes
) -> Cell:
    """The mean of each seed's own ratio, or why there is none."""
    if not group.perplexities:
        return problem_cell(group, length, notes)
    below = base.perplexities if base is not None else {}
    ratios = [group.perplexities[seed] / below[seed] for seed in below.keys() & group.perplexities]
    if not ratios:
        told = [f"; {status}: {message}" for status, message in reasons(base, trained)]
        why = f"no ratio: not scored at the training length with the same seed{''.join(told)}"
        return Cell(ABSENT, marks=(notes.mark(why),))
    causes = sorted({*reasons(group, length), *reasons(base, trained)})
    marks = short_marks(len(ratios), expected, causes, notes) + remark_marks([group, base], notes)
    return replace(ratio_cell(summarize(ratios)), marks=marks)


def _published_ratios(published: Sequence[PublishedRow], method: str) -> dict[float, Cell]:
    found = {}
    for row in query(published, method=method):
        ratio = published_ratio(published, method, row.eval_length, row.train_length)
        if ratio is not None:
            found[row.eval_length / row.train_length] = ratio_cell(Summary(ratio, None, 1))
    return found


def ratio_cell(summary: Summary) -> Cell:
    """A ratio: beside 1, where most of them lie, three decimals in every cell."""
    return number_cell(summary, 3 if abs(summary.mean) < 9.9995 else None)


def minus(ours: Cell, theirs: Cell) -> Cell:
    """Ours minus the published number, with the coarser decimals of the two; a dash without either."""
    if ours.mean is None or theirs.mean is None:
        return Cell(ABSENT)
    places = min(_places(ours.text), _places(theirs.text))
    difference = ours.mean - theirs.mean
    return Cell(f"{difference:+.{places}f}", mean=difference, seeds=ours.seeds)


def _places(text: str) -> int:
    return len(text.partition(".")[2]) if "e" not in text else 0
