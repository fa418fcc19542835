"""One part of the report's page, and how it says that something cannot be shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_patches.analysis.failures import Failure
from megatron_patches.analysis.layout import Table
from megatron_patches.analysis.markup import Markup, element

FOLDED = 30  # a table of more lines is folded away


@dataclass(frozen=True)
class Part:
    """One section of the page: its heading, what the filters compare, and its content.

    ``protocol`` may be several with spaces between: all of them are needed. ``detail`` tells parts of
    the same title apart.
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


def failure_parts(failures: Iterable[Failure]) -> list[Part]:
    """What failed and has no result since, a part a data set."""
    by_dataset: dict[str, list[Markup]] = {}
    for item in failures:
        texts = (item.run, item.step, str(item.exit_code), item.message, item.log, item.when)
        cells = [element("td", text) for text in texts[1:]]
        line = element("tr", element("th", texts[0], scope="row"), *cells, data_method=item.method)
        by_dataset.setdefault(item.dataset, []).append(line)
    names = ("run", "step", "exit code", "message", "log", "when")
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    return [
        Part(
            f"{dataset}, failed steps",
            dataset,
            [
                element("p", "These have no result; started again, a sweep tries them again."),
                element("div", element("table", head, element("tbody", *lines)), class_="wide"),
            ],
        )
        for dataset, lines in sorted(by_dataset.items())
    ]
