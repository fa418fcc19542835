"""The report's parts on evaluated rows: charts, tables, what was measured, where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_patches.analysis.aggregate import (
    Group,
    collect,
    configurations,
    provenance,
    series_label,
    shorten,
)
from megatron_patches.analysis.charts import Line, Point, perplexity_chart
from megatron_patches.analysis.differences_table import differences_table
from megatron_patches.analysis.figures import spread_over
from megatron_patches.analysis.layout import Table, format_number
from megatron_patches.analysis.markup import Markup, Tags, element, paragraphs, table_html
from megatron_patches.analysis.parts import Part, folded
from megatron_patches.analysis.published import REFERENCE, PublishedRow, query
from megatron_patches.analysis.report_position import position_figures
from megatron_patches.analysis.rows import WHOLE_WINDOW, Row
from megatron_patches.analysis.sections import Section
from megatron_patches.analysis.statistics import summarize
from megatron_patches.analysis.tables import extrapolation_table, published_table, relative_table
from megatron_patches.analysis.undrawn import perplexity_notes

PAPER, MAIN_TABLE = "KERPLE", "Table 3"
RUN_FIELDS = (
    *("seed", "config_sha", "git_sha", "data", "tokenizer", "engine", "attention", "dtype"),
    *("step", "parameters"),
)


@dataclass(frozen=True)
class Settings:
    """What the command line chooses. ``beside``: our data set -> the published one to set it by."""

    reference: str = REFERENCE
    published: Sequence[PublishedRow] = ()
    beside: Mapping[str, str] = field(default_factory=dict)


def rows_part(section: Section, style: Mapping[str, int], settings: Settings) -> Part:
    """Rows of one question: perplexity, loss by position, tables, runs."""
    rows = section.rows
    body = []
    if section.problem is None:
        known = [*provenance(rows), configurations(rows)]
        if len({row.eval_length for row in rows}) > 1:
            body.append(_chart(rows, style))
        body += [*position_figures(rows, style), *_tables(rows, known, settings)]
        body.append(element("details", element("summary", "What was measured"), paragraphs(known)))
    else:
        text = f"Not shown as a table: {section.problem}"
        body.append(element("p", text, class_="refused"))
    body.append(_runs(section))
    first = rows[0]
    tokens = max(row.tokens for row in rows)
    detail = f"{tokens:,} tokens of data {shorten(first.data)}"
    return Part(section.title, first.dataset, body, first.protocol, first.train_length, detail)


def _tables(rows: list[Row], known: Sequence[str], settings: Settings) -> list[Markup]:
    methods = {series_label(row): row.method for row in rows}
    tables = [extrapolation_table(rows, reference=settings.reference)]
    tables += _published(rows, settings)
    shown = [_tagged(table, methods, rows[0].train_length, known) for table in tables]
    if settings.reference in methods:
        table = differences_table(rows, reference=settings.reference)
        shown.append(folded(table, _tagged(table, methods, rows[0].train_length, known)))
    return shown


def _published(rows: list[Row], settings: Settings) -> list[Table]:
    """The paper's tables for this data set, as far as they add a method of ours; then the trend.

    A table is shown for the training length of the rows; trends, being over multiples of it, are
    set beside the paper's main table whatever that is. The paper scores whole windows: rows of a
    protocol that does not are set beside nothing.
    """
    trend = any(row.eval_length == row.train_length and row.loss is not None for row in rows)
    if rows[0].protocol not in WHOLE_WINDOW:
        return [relative_table(rows)] if trend else []
    dataset = settings.beside.get(rows[0].dataset, rows[0].dataset)
    there = query(settings.published, paper=PAPER, dataset=dataset)
    there = [row for row in there if row.unit == "perplexity"]
    fitting = query(there, train_length=rows[0].train_length)
    left, tables = {row.method for row in rows}, []
    for name in dict.fromkeys(row.table for row in fitting):
        methods = {row.method for row in query(fitting, table=name)}
        if methods & left:
            tables.append(
                published_table(
                    fitting, table=name, dataset=dataset, train_length=rows[0].train_length
                )
            )
        left -= methods
    return [*tables, *([relative_table(rows, query(there, table=MAIN_TABLE))] if trend else [])]


def _tagged(
    table: Table, methods: Mapping[str, str], train_length: int, known: Sequence[str]
) -> Markup:
    """The table with the method and length of each line and column, for the filters."""

    def column(text: str) -> Tags:
        if text.startswith("×"):
            return {"data_length": f"{float(text[1:]) * train_length:.0f}"}
        return {"data_length": text} if text.isdigit() else {}

    def row(label: str) -> Tags:
        # "alibi", "alibi, ours", "alibi, KERPLE Table 3" or "alibi, 512"
        start, comma, end = label.rpartition(", ")
        if label in methods or not comma:
            return {"data_method": methods.get(label, label), "data_variant": label}
        length = {"data_length": end} if end.isdigit() else {}
        return {"data_method": methods.get(start, start), "data_variant": start, **length}

    return table_html(table, row_tags=row, column_tags=column, known=known)


def _chart(rows: list[Row], style: Mapping[str, int]) -> Markup:
    methods = {series_label(row): row.method for row in rows}
    series, lines = collect(rows), []
    lengths = sorted({row.eval_length for row in rows})
    for label, groups in series.items():
        points = _points(label, groups, lengths)
        if points:
            lines.append(Line(label, methods[label], style[label], points))
    if not lines:
        return element("p", "No perplexity to draw: every cell was refused or failed.")
    caption = f"Perplexity against length, {rows[0].dataset}"
    chart = perplexity_chart(lines, rows[0].train_length)
    seeds = len({row.seed for row in rows})
    notes = paragraphs([spread_over(seeds), *perplexity_notes(series, seeds)])
    return element("figure", element("figcaption", caption), chart, notes)


def _points(label: str, groups: Mapping[int, Group], lengths: Sequence[int]) -> list[Point]:
    points: list[Point] = []
    stretch = 0
    for length in lengths:
        group = groups.get(length)
        if group is None or not group.perplexities:
            stretch += 1
            continue
        summary = summarize(group.perplexities.values())
        spread = summary.std or 0.0
        shown = format_number(summary.mean) + (
            f" ± {format_number(spread)}" if summary.std is not None else ""
        )
        seeds = f"{summary.count} seed" + ("s" if summary.count > 1 else "")
        tip = f"{label}, {length} tokens: {shown} ({seeds})"
        # A band that reached zero could not be drawn on a logarithmic axis.
        low = max(summary.mean - spread, summary.mean / 10)
        points.append(Point(length, summary.mean, low, summary.mean + spread, tip, stretch))
    return points


def _runs(section: Section) -> Markup:
    """Where every number comes from: one line a trained model, with the hashes that name it."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in section.rows:
        key = tuple(shorten(str(getattr(row, name))) for name in RUN_FIELDS)
        runs.setdefault((series_label(row), *key), []).append(row)
    head = [element("th", text, scope="col") for text in ("run", *RUN_FIELDS, "cells", "seconds")]
    lines = []
    for key, rows in sorted(runs.items()):
        done = sum(row.status == "ok" for row in rows)
        other = [f"{row.eval_length} {row.status}" for row in rows if row.status != "ok"]
        cells = ", ".join([f"{done} ok", *other])
        seconds = f"{math.fsum(row.seconds for row in rows):.1f}"
        values = [element("td", text) for text in (*key[1:], cells, seconds)]
        name = element("th", key[0], scope="row")
        tags = {"data_method": rows[0].method, "data_variant": key[0]}
        lines.append(element("tr", name, *values, **tags))
    table = element("table", element("thead", element("tr", *head)), element("tbody", *lines))
    return element(
        "details",
        element("summary", f"Runs ({len(runs)})"),
        element("p", f"From {', '.join(section.files)}"),
        element("div", table, class_="wide runs"),
    )
