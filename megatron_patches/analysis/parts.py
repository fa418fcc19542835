"""One part of the report's page, and how it says that something cannot be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_patches.analysis.layout import Table
from megatron_patches.analysis.markup import Markup, element

FOLDED = 30  # a table of more lines is folded away


@dataclass(frozen=True)
class Part:
    """One section of the page: its heading, what the filters compare, and its content.

    ``detail`` tells parts of the same title apart.
    """

    title: str
    dataset: str
    body: Sequence[Markup]
    protocol: str | None = None
    train_length: int | None = None
    detail: str = ""


def distinct(parts: Sequence[Part]) -> list[Part]:
    """The parts, with ``detail`` in the titles that several of them have, then a number."""
    titles = [part.title for part in parts]
    named = [
        replace(part, title=f"{part.title}, {part.detail}")
        if titles.count(part.title) > 1 and part.detail
        else part
        for part in parts
    ]
    titles = [part.title for part in named]
    return [
        replace(part, title=f"{part.title} ({titles[:place].count(part.title) + 1})")
        if titles.count(part.title) > 1
        else part
        for place, part in enumerate(named)
    ]


def refused(error: object) -> Markup:
    """Why something is not shown."""
    return element("p", f"Not shown: {error}", class_="refused")


def folded(table: Table, shown: Markup) -> Markup:
    """``shown``, the markup of ``table``, behind a line to click where the table is long."""
    if len(table.rows) <= FOLDED:
        return shown
    return element("details", element("summary", f"{table.title}: {len(table.rows)} lines"), shown)
