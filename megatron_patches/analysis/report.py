"""The report: one HTML page of tables, charts, filters and provenance, from rows alone.

The page holds its style and its script and asks nothing of any server; a content policy with the
hashes of both forbids it to, and stops any other script. Everything that is text in a row is
escaped (``markup``).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from megatron_patches.analysis.aggregate import Labelled, series_label
from megatron_patches.analysis.failures import Failure, open_failures
from megatron_patches.analysis.looks import numbered
from megatron_patches.analysis.markup import Markup, element, verbatim
from megatron_patches.analysis.parts import Part, distinct, failure_parts
from megatron_patches.analysis.report_kernels import kernel_parts
from megatron_patches.analysis.report_models import training_parts
from megatron_patches.analysis.report_position import early_parts
from megatron_patches.analysis.report_rows import Settings, rows_part
from megatron_patches.analysis.retrieval_markup import retrieval_markup
from megatron_patches.analysis.retrieval_rows import RetrievalRow
from megatron_patches.analysis.rows import KernelRow, Row, RowError
from megatron_patches.analysis.sections import Source, cut
from megatron_patches.analysis.training_rows import TrainingRow

__all__ = ["Extras", "Settings", "report"]

TITLE = "Position methods beyond their training length"
# With more sections than this the page starts folded: a browser draws what is unfolded only.
UNFOLDED = 6


@dataclass(frozen=True)
class Extras:
    """What may stand beside evaluated rows."""

    kernels: Sequence[KernelRow] = ()
    training: Sequence[TrainingRow] = ()
    retrieval: Sequence[RetrievalRow] = field(default_factory=tuple)
    failed: Sequence[Failure] = ()


def report(
    sources: Iterable[Source], extras: Extras | None = None, settings: Settings | None = None
) -> str:
    """The whole page as HTML text; the same rows give the same text. RowError for no rows."""
    settings, extras = settings or Settings(), extras or Extras()
    sources = list(sources)
    rows = [row for source in sources for row in source.rows]
    everything: list[Labelled] = [*rows, *extras.training, *extras.kernels, *extras.retrieval]
    if not everything:
        raise RowError("no rows: nothing to report")
    style = numbered(everything)
    parts = [rows_part(section, style, settings) for section in cut(sources)]
    parts += early_parts(rows)
    parts += training_parts(extras.training, style)
    parts += kernel_parts(extras.kernels, style)
    parts += _retrieval_parts(extras.retrieval)
    results = [*rows, *extras.training, *extras.retrieval]
    parts += failure_parts(open_failures(extras.failed, results))
    # A stable sort: the order above within a data set.
    parts = distinct(sorted(parts, key=lambda part: part.dataset))
    files = ", ".join(source.name for source in sources)
    body = [
        element("h1", TITLE),
        element("p", f"Made of {len(rows)} rows{_beside(extras)}: {files}"),
        _navigation(parts),
        _filters(rows, everything),
        element("main", *(_section(place, part, len(parts)) for place, part in _numbered(parts))),
        element("div", id="tip", role="tooltip", hidden=True),
    ]
    return _page(body)


def _beside(extras: Extras) -> str:
    counts = {
        "training runs": extras.training,
        "heads' kernels": extras.kernels,
        "retrieval cells": extras.retrieval,
    }
    told = [f"{len(rows)} {name}" for name, rows in counts.items() if rows]
    return f" (beside them {', '.join(told)})" if told else ""


def _numbered(parts: Sequence[Part]) -> Iterable[tuple[str, Part]]:
    return ((f"s{number}", part) for number, part in enumerate(parts, 1))


def _navigation(parts: Sequence[Part]) -> Markup:
    """Links by data set."""
    by_dataset: dict[str, list[Markup]] = {}
    for name, part in _numbered(parts):
        # The heading starts with the data set, which the list says already.
        title = part.title.removeprefix(f"{part.dataset}, ")
        link = element("li", element("a", title, href=f"#{name}"), **_tags(part))
        by_dataset.setdefault(part.dataset, []).append(link)
    lists = [
        element("li", dataset, element("ul", *links), data_dataset=dataset)
        for dataset, links in by_dataset.items()
    ]
    return element("nav", element("ul", *lists))


def _section(name: str, part: Part, count: int) -> Markup:
    folded = element(
        "details",
        element("summary", element("h2", part.title)),
        *part.body,
        open=count <= UNFOLDED,
        class_="part",
    )
    return element("section", folded, id=name, **_tags(part))


def _tags(part: Part) -> Mapping[str, str | None]:
    """What the filters compare: the section and the link to it come and go together."""
    trained = None if part.train_length is None else str(part.train_length)
    return {
        "data_dataset": part.dataset,
        "data_protocol": part.protocol,
        "data_trained": trained,
    }


def _retrieval_parts(rows: Sequence[RetrievalRow]) -> list[Part]:
    groups: dict[tuple[str, int], list[RetrievalRow]] = {}
    for row in rows:
        groups.setdefault((row.dataset, row.train_length), []).append(row)
    return [
        Part(
            f"{dataset}, retrieval, trained on {length} tokens",
            *(dataset, [retrieval_markup(own)], None, length),
        )
        for (dataset, length), own in sorted(groups.items())
    ]


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


def _numbers(rows: Sequence[Labelled], name: str) -> list[str]:
    """The values of a field in ascending order, of the kinds of rows that have it."""
    found: set[int] = {getattr(row, name, None) or 0 for row in rows}
    return [str(value) for value in sorted(found - {0})]


def _variants(rows: Sequence[Labelled]) -> list[str]:
    """The labels of the methods that have more than one."""
    labels: dict[str, set[str]] = {}
    for row in rows:
        labels.setdefault(row.method, set()).add(series_label(row))
    return sorted(label for found in labels.values() if len(found) > 1 for label in found)


def _filters(rows: Sequence[Row], everything: Sequence[Labelled]) -> Markup:
    """A box for each value; hidden until the script, without which it would do nothing, runs."""
    trained = _numbers(everything, "train_length")
    lengths = _numbers(everything, "eval_length")
    choices = {
        "method": sorted({row.method for row in everything}),
        "variant": _variants(everything),
        "dataset": sorted({str(getattr(row, "dataset", "")) for row in everything}),
        "trained": trained,
        "length": lengths,
        "protocol": sorted({row.protocol for row in rows}),
    }
    names = {"trained": "trained on"}
    sets = []
    for name, values in choices.items():
        if name == "variant" and not values:
            continue
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
        sets.append(element("fieldset", element("legend", names.get(name, name), *buttons), *boxes))
    return element("form", *sets, hidden=True, aria_label="Filters")
