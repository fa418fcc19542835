"""The report: one HTML page of tables, charts, filters and provenance, from rows alone.

The page holds its style and its script and asks nothing of any server; a content policy with the
hashes of both forbids it to, and stops any other script. Everything that is text in a row is
escaped (``markup``).
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from megatron_patches.analysis.aggregate import (
    collect,
    configurations,
    provenance,
    series_label,
    shorten,
)
from megatron_patches.analysis.charts import Line, Point, kernel_chart, perplexity_chart
from megatron_patches.analysis.differences import differences_table
from megatron_patches.analysis.figures import kernel_groups
from megatron_patches.analysis.layout import Table, format_number
from megatron_patches.analysis.markup import (
    Markup,
    Tags,
    element,
    join,
    paragraphs,
    table_html,
    verbatim,
)
from megatron_patches.analysis.published import REFERENCE, PublishedRow, query
from megatron_patches.analysis.rows import KernelRow, Row, RowError
from megatron_patches.analysis.sections import Section, Source, cut
from megatron_patches.analysis.statistics import summarize
from megatron_patches.analysis.tables import extrapolation_table, published_table, relative_table

PAPER, MAIN_TABLE = "KERPLE", "Table 3"
TITLE = "Position methods beyond their training length"
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


def report(
    sources: Iterable[Source], kernels: Iterable[KernelRow] = (), settings: Settings | None = None
) -> str:
    """The whole page as HTML text; the same rows give the same text. RowError for no rows."""
    settings = settings or Settings()
    sources, kernels = list(sources), list(kernels)
    sections = cut(sources)
    if not sections:
        raise RowError("no rows: nothing to report")
    labels = sorted({series_label(row) for source in sources for row in source.rows})
    style = {label: index for index, label in enumerate(labels)}
    parts = [
        _section(f"s{number}", section, style, settings)
        for number, section in enumerate(sections, 1)
    ]
    links = [(f"s{number}", section.title) for number, section in enumerate(sections, 1)]
    if any(row.bias is not None or row.weight is not None for row in kernels):
        parts.append(_kernels(kernels, style))
        links.append(("kernels", "Learned kernels"))
    count = sum(len(source.rows) for source in sources)
    files = ", ".join(source.name for source in sources)
    items = [element("li", element("a", text, href=f"#{name}")) for name, text in links]
    body = [
        element("h1", TITLE),
        element("p", f"Made of {count} rows: {files}"),
        element("nav", element("ul", *items)),
        _filters([row for source in sources for row in source.rows]),
        element("main", *parts),
        element("div", id="tip", role="tooltip", hidden=True),
    ]
    return _page(body)


def _page(body: Sequence[Markup]) -> str:
    style, script = (_own_file(name) for name in ("report.css", "report.js"))
    allowed = "; ".join(
        [
            "default-src 'none'",
            "img-src data:",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=allowed),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # An icon that is here already: a browser would ask the server for one.
        element("link", rel="icon", href="data:,"),
        element("title", TITLE),
        verbatim("style", style),
    )
    page = element("html", head, element("body", *body, verbatim("script", script)), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _own_file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()


def _filters(rows: Iterable[Row]) -> Markup:
    """A box for each value; hidden until the script, without which it would do nothing, runs."""
    rows = list(rows)
    choices = {
        "method": sorted({row.method for row in rows}),
        "dataset": sorted({row.dataset for row in rows}),
        "length": [str(length) for length in sorted({row.eval_length for row in rows})],
        "protocol": sorted({row.protocol for row in rows}),
    }
    sets = []
    for name, values in choices.items():
        boxes = [
            element(
                "label",
                element("input", type="checkbox", name=name, value=value, checked=True),
                f" {value}",
            )
            for value in values
        ]
        buttons = [
            element("button", text, type="button", name=name, value=text)
            for text in ("all", "none")
        ]
        sets.append(element("fieldset", element("legend", name, *buttons), *boxes))
    return element("form", *sets, hidden=True, aria_label="Filters")


def _section(name: str, section: Section, style: Mapping[str, int], settings: Settings) -> Markup:
    rows = section.rows
    tags = {"data_dataset": rows[0].dataset, "data_protocol": rows[0].protocol}
    parts = [element("h2", section.title)]
    if section.problem is None:
        known = [*provenance(rows), configurations(rows)]
        parts += [_chart(rows, style), *_tables(rows, known, settings)]
        parts.append(element("details", element("summary", "What was measured"), paragraphs(known)))
    else:
        parts.append(element("p", f"Not shown as a table: {section.problem}", class_="refused"))
    parts.append(_runs(section))
    return element("section", *parts, id=name, **tags)


def _tables(rows: list[Row], known: Sequence[str], settings: Settings) -> list[Markup]:
    methods = {series_label(row): row.method for row in rows}
    tables = [extrapolation_table(rows, reference=settings.reference)]
    tables += _published(rows, settings)
    if settings.reference in methods:
        tables.append(differences_table(rows, reference=settings.reference))
    return [_tagged(table, methods, rows[0].train_length, known) for table in tables]


def _published(rows: list[Row], settings: Settings) -> list[Table]:
    """The paper's tables for this data set, as far as they add a method of ours; then the trend.

    A table is shown for the training length of the rows; trends, being over multiples of it, are
    set beside the paper's main table whatever that is.
    """
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
    return [*tables, relative_table(rows, query(there, table=MAIN_TABLE))]


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
            return {"data_method": methods.get(label, label)}
        length = {"data_length": end} if end.isdigit() else {}
        return {"data_method": methods.get(start, start), **length}

    return table_html(table, row_tags=row, column_tags=column, known=known)


def _chart(rows: list[Row], style: Mapping[str, int]) -> Markup:
    methods = {series_label(row): row.method for row in rows}
    lines = []
    for label, groups in collect(rows).items():
        points = []
        for length in sorted(groups):
            if groups[length].perplexities:
                summary = summarize(groups[length].perplexities.values())
                spread = summary.std or 0.0
                shown = format_number(summary.mean) + (
                    f" ± {format_number(spread)}" if summary.std is not None else ""
                )
                seeds = f"{summary.count} seed" + ("s" if summary.count > 1 else "")
                tip = f"{label}, {length} tokens: {shown} ({seeds})"
                # A band that reached zero could not be drawn on a logarithmic axis.
                low = max(summary.mean - spread, summary.mean / 10)
                points.append(Point(length, summary.mean, low, summary.mean + spread, tip))
        if points:
            lines.append(Line(label, methods[label], style[label], points))
    if not lines:
        return element("p", "No perplexity to draw: every cell was refused or failed.")
    caption = f"Perplexity against length, {rows[0].dataset}"
    chart = perplexity_chart(lines, rows[0].train_length)
    return element("figure", element("figcaption", caption), chart)


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
        lines.append(element("tr", name, *values, data_method=rows[0].method))
    table = element("table", element("thead", element("tr", *head)), element("tbody", *lines))
    return element(
        "details",
        element("summary", f"Runs ({len(runs)})"),
        element("p", f"From {', '.join(section.files)}"),
        element("div", table, class_="wide runs"),
    )


def _kernels(kernels: Iterable[KernelRow], style: Mapping[str, int]) -> Markup:
    groups: dict[tuple[str, int], list[KernelRow]] = {}
    for row in kernels:
        if row.bias is not None or row.weight is not None:
            groups.setdefault((row.dataset, row.seed), []).append(row)
    figures = []
    for (dataset, seed), rows in sorted(groups.items()):
        for title, heads in kernel_groups(rows).items():
            method = heads[0].method
            caption = element("figcaption", f"{title}, {dataset}, seed {seed}")
            chart = kernel_chart(title, heads, style.get(method, 0))
            tags = {"data_method": method, "data_dataset": dataset}
            figures.append(element("figure", caption, chart, **tags))
    note = "A line a head, paler the farther it reaches; a dot marks its effective length."
    grid = element("div", *figures, class_="kernels")
    return element(
        "section", element("h2", "Learned kernels"), join([grid, paragraphs([note])]), id="kernels"
    )
