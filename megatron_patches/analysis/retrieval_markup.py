"""Retrieval on the report's page: a heat map a method as inline SVG, and the table by length.

Nothing here needs a style of its own: shades are the page's ink at an opacity, which is readable on
light and on dark ground, and the cells carry what the page's filters compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_patches.analysis.aggregate import series_label, shorten
from megatron_patches.analysis.jsonl import RowError
from megatron_patches.analysis.layout import ABSENT
from megatron_patches.analysis.markup import Markup, element, join, paragraphs, table_html
from megatron_patches.analysis.retrieval_grid import (
    VALUES,
    Grid,
    Square,
    axes_of,
    collect_retrieval,
    decimals_for,
    questions,
    seeds_in,
    short_notes,
    shown,
    title,
)
from megatron_patches.analysis.retrieval_rows import COMPARED_FIELDS, RetrievalRow
from megatron_patches.analysis.retrieval_tables import retrieval_table

WIDTH, HEIGHT = 58, 26  # of a cell, in the picture's units
LEFT, TOP, BELOW = 56, 8, 40
STRONGEST = 0.45  # opacity of the highest value: text of the same ink keeps a contrast above 4.5
VALUE = "gain"
NOTE = (
    "Depth 0: the needle at the start of the window; 1: right before the question. Darker is more, "
    "on one scale from 0 for all methods; crossed cells have no score. Mean over seeds; *: not over all."
)


def retrieval_markup(rows: Iterable[RetrievalRow]) -> Markup:
    """A ``section`` a question; rows that may not meet are said so, and no row disappears."""
    groups = questions(rows)
    return join(_section(group, name) for group, name in zip(groups, headings(groups), strict=True))


def headings(groups: Sequence[Sequence[RetrievalRow]]) -> list[str]:
    """The title of each question, and, where several have the same, the fields in which they differ."""
    titles = [title(group[0]) for group in groups]
    found = []
    for group, name in zip(groups, titles, strict=True):
        alike = [other[0] for other, text in zip(groups, titles, strict=True) if text == name]
        told = [
            f"{field} {shorten(str(getattr(group[0], field)))}"
            for field in COMPARED_FIELDS
            if len({str(getattr(row, field)) for row in alike}) > 1
        ]
        found.append(", ".join([name, *told]))
    return found


def _section(rows: list[RetrievalRow], name: str) -> Markup:
    heading = element("h3", f"Retrieval, {name}")
    tags = {"data_dataset": rows[0].dataset, "data_trained": str(rows[0].train_length)}
    try:
        grid = collect_retrieval(rows)
        table = retrieval_table(rows, value=VALUE)
    except RowError as error:
        problem = element("p", f"Not shown: {error}", class_="refused")
        return element("section", heading, problem, **tags)
    methods = {series_label(row): row.method for row in rows}
    shown_table = table_html(
        table,
        row_tags=lambda label: {"data_method": methods[label], "data_variant": label},
        column_tags=lambda column: {"data_length": column},
        known=table.header,
    )
    details = element("details", element("summary", "What was asked"), paragraphs(table.header))
    maps = element("div", *_maps(grid, methods), class_="kernels")
    notes = paragraphs([NOTE, *short_notes(grid)])
    return element("section", heading, maps, notes, shown_table, details, **tags)


@dataclass(frozen=True)
class _Drawn:
    """What all cells have in common: the highest mean, decimals, seeds."""

    top: float
    places: int
    seeds: int


def _maps(grid: Grid, methods: Mapping[str, str]) -> list[Markup]:
    squares = [square for line in grid.values() for square in line.values()]
    means = [mean for square in squares if (mean := square.mean(VALUE)) is not None]
    drawn = _Drawn(max(means, default=0.0), decimals_for(means), seeds_in(grid))
    return [
        element(
            "figure",
            element("figcaption", label),
            _map(label, line, axes_of(grid), drawn),
            data_method=methods[label],
            data_variant=label,
        )
        for label, line in grid.items()
    ]


def _map(
    label: str,
    line: Mapping[tuple[int, float], Square],
    ticks: tuple[list[int], list[float]],
    drawn: _Drawn,
) -> Markup:
    lengths, depths = ticks
    bottom = TOP + HEIGHT * len(depths)
    columns = []
    for column, length in enumerate(lengths):
        x = LEFT + WIDTH * column
        cells = [
            _cell(
                f"{label}, {length} tokens, depth {depth:g}",
                (x, TOP + HEIGHT * row),
                line.get((length, depth), Square()),
                drawn,
            )
            for row, depth in enumerate(depths)
        ]
        name = _text(x + WIDTH / 2, bottom + 16, str(length))
        columns.append(element("g", *cells, name, data_length=str(length)))
    names = [
        _text(LEFT - 6, TOP + HEIGHT * (row + 0.5) + 4, f"{depth:g}", class_="end")
        for row, depth in enumerate(depths)
    ]
    middle = LEFT + WIDTH * len(lengths) / 2
    return element(
        "svg",
        *(*columns, *names),
        _text(middle, bottom + 34, "evaluation length (tokens)"),
        _text(0, 0, "depth", transform=f"translate(12 {(TOP + bottom) / 2:.1f}) rotate(-90)"),
        viewBox=f"0 0 {LEFT + WIDTH * len(lengths) + 8} {bottom + BELOW}",
        role="group",
        aria_label=f"{VALUES[VALUE]} by length and depth, {label}",
    )


def _cell(
    name: str,
    corner: tuple[float, float],
    square: Square,
    drawn: _Drawn,
) -> Markup:
    x, y = corner
    mean = square.mean(VALUE)
    box = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": str(WIDTH), "height": str(HEIGHT)}
    # Nothing and less than nothing are white: a needle that misleads is told by its number.
    opacity = STRONGEST * mean / drawn.top if mean is not None and mean > 0 else 0.0
    parts = [element("title", f"{name}: {_tip(square)}")]
    parts.append(element("rect", **box, fill_opacity=f"{opacity:.3f}", class_="grid"))
    if mean is None and square.problems:
        for y1, y2 in ((y, y + HEIGHT), (y + HEIGHT, y)):
            ends = {
                "x1": f"{x:.1f}",
                "y1": f"{y1:.1f}",
                "x2": f"{x + WIDTH:.1f}",
                "y2": f"{y2:.1f}",
            }
            parts.append(element("line", **ends, class_="grid"))
    text = shown(mean, drawn.places) if mean is not None else square.status or ABSENT
    text += "*" if square.seeds_of(drawn.seeds) else ""
    parts.append(_text(x + WIDTH / 2, y + HEIGHT / 2 + 4, text))
    return element("g", *parts, tabindex="0", data_value=None if mean is None else repr(mean))


def _tip(square: Square) -> str:
    """All that the rows of a square say, mean over seeds."""
    why = [f"seed {seed} {how}: {said}" for seed, (how, said) in sorted(square.problems.items())]
    if not square.rows:
        return "; ".join(why) or "no row"
    rows = list(square.rows.values())
    named = {
        "gain": "gain",
        "loss": "loss",
        "control_loss": "control",
        "token_accuracy": "token accuracy",
        "control_accuracy": "in the control",
        "exact": "exact",
    }
    # Significant digits: far back, a gain may be small and still sure.
    parts = [f"{text} {square.mean(name):.4g}" for name, text in named.items()]
    count = f"{len(rows)} seed" + ("s" if len(rows) > 1 else "")
    return "; ".join([", ".join(parts), f"{rows[0].distance} tokens back", count, *why])


def _text(x: float, y: float, text: str, **attributes: str) -> Markup:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)
