"""HTML and inline SVG from untrusted text: what is not ``Markup`` is escaped when it is put in."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping

from megatron_patches.analysis.layout import Cell, Table


class Markup(str):
    """Text that ``element`` made; nothing else may be given this type."""


# What a filter compares: data-method, data-length, ... of an element.
Tags = Mapping[str, str]
_VOID = {"input", "link", "meta"}


def element(tag: str, /, *children: str, **attributes: str | bool | None) -> Markup:
    """``<tag ...>children</tag>``; children that are no Markup and all attributes are escaped.

    ``class_`` and ``data_method`` are spelled class and data-method. An attribute of True stands
    without a value, one of None or False is left out.
    """
    parts = [tag]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelled = key.removesuffix("_").replace("_", "-")
        parts.append(spelled if value is True else f'{spelled}="{_escape(str(value))}"')
    start = f"<{' '.join(parts)}>"
    if tag in _VOID:
        return Markup(start)
    return Markup(f"{start}{join(children)}</{tag}>")


def join(children: Iterable[str], between: str = "") -> Markup:
    """The children one after the other, escaped where they are plain text."""
    shown = (child if isinstance(child, Markup) else _escape(child) for child in children)
    return Markup(between.join(shown))


def verbatim(name: str, text: str) -> Markup:
    """A ``script`` or ``style`` element with our own ``text``, which HTML does not unescape there."""
    if f"</{name}" in text.lower():
        raise ValueError(f"the text would end its own <{name}>")
    return Markup(f"<{name}>{text}</{name}>")


def _escape(text: str) -> str:
    # A lone surrogate, which JSON can spell, has no UTF-8 and would fail only when written.
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"), quote=True)


def table_html(
    table: Table,
    *,
    row_tags: Callable[[str], Tags],
    column_tags: Callable[[str], Tags],
    known: Iterable[str] = (),
) -> Markup:
    """A ``table`` with its notes; ``known`` are header lines that the page shows elsewhere.

    ``row_tags`` and ``column_tags`` give the attributes (``data_method``, ``data_length``) by
    which a label or a column is filtered.
    """
    tags = [column_tags(column) for column in table.columns]
    head = [element("th", table.corner, scope="col")] + [
        element("th", column, scope="col", **tag)
        for column, tag in zip(table.columns, tags, strict=True)
    ]
    body = [
        element(
            "tr",
            element("th", label, scope="row"),
            *(element("td", _cell(cell), **tag) for cell, tag in zip(cells, tags, strict=True)),
            **row_tags(label),
        )
        for label, cells in table.rows
    ]
    seen = set(known)
    lines = [line for line in (*table.header, *table.notes) if line not in seen]
    grid = element(
        "table",
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    return element(
        "figure",
        element("figcaption", table.title),
        element("div", grid, class_="wide"),
        paragraphs(lines),
    )


def paragraphs(lines: Iterable[str]) -> Markup:
    """Small print, a line each."""
    return element("div", *(element("p", line) for line in lines), class_="notes")


def _cell(cell: Cell) -> Markup:
    text = cell.text + (f"±{cell.spread}" if cell.spread else "")
    shown = element("strong", text) if cell.bold else text
    return join([shown, element("sup", " ".join(cell.marks)) if cell.marks else Markup("")])
