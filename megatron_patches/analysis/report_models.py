"""The report's parts on training: curves, runs, and position parameters while they were learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.line_charts import MOST_POINTS, THINNED, Axes, Trace, line_chart
from megatron_patches.analysis.markup import Markup, element, paragraphs, table_html
from megatron_patches.analysis.parts import Part, folded, refused
from megatron_patches.analysis.rows import RowError
from megatron_patches.analysis.training_curves import (
    Curve,
    loss_curves,
    parameter_curves,
    training_table,
    validation_curves,
)
from megatron_patches.analysis.training_rows import TrainingRow, training_groups

PARAMETER_NOTE = (
    "Mean over heads (and buckets) and seeds, band from the lowest to the highest of all."
)
Styles = Mapping[str, int]  # label -> number of its colour and dashes on the page


def training_parts(rows: Iterable[TrainingRow], style: Styles) -> list[Part]:
    """Curves, parameters and runs of each text and length trained on."""
    by_dataset: dict[str, list[TrainingRow]] = {}
    for row in rows:
        by_dataset.setdefault(row.dataset, []).append(row)
    parts = []
    for dataset, own in sorted(by_dataset.items()):
        try:
            groups = training_groups(own)
        except RowError as error:
            parts.append(Part(f"{dataset}, training", dataset, [refused(error)]))
            continue
        parts += [_training_part(group, style) for group in groups]
    return parts


def _training_part(rows: list[TrainingRow], style: Styles) -> Part:
    first = rows[0]
    title = (
        f"{first.dataset}, training on {first.train_length} tokens for {first.train_iters} steps of "
        f"{first.global_batch} sequences"
    )
    body = []
    for name, curves in (
        ("Training loss as logged", loss_curves(rows)),
        ("Validation loss", validation_curves(rows)),
    ):
        if curves:
            axes = Axes(name, "tokens read", "loss (nats per token)", "tokens")
            chart = line_chart([_trace(curve, style) for curve in curves], axes)
            caption = element("figcaption", f"{name}, mean and range over seeds")
            many = any(len(curve.tokens) > MOST_POINTS for curve in curves)
            note = paragraphs([THINNED] if many else [])
            body.append(element("figure", caption, chart, note))
    methods = {f"{series_label(row)}, seed {row.seed}": row.method for row in rows}
    table = training_table(rows)
    shown = table_html(
        table,
        row_tags=lambda label: {
            "data_method": methods[label],
            "data_variant": label.rpartition(", seed ")[0],
        },
        column_tags=lambda column: {},
    )
    body.append(folded(table, shown))
    body += _parameters(rows, style)
    return Part(title, first.dataset, body, None, first.train_length)


def _trace(curve: Curve, style: Styles) -> Trace:
    seeds = f"{curve.seeds} seed" + ("s" if curve.seeds > 1 else "")
    return Trace(
        label=curve.label,
        method=curve.method,
        index=style[curve.label],
        xs=curve.tokens,
        ys=curve.mean,
        tip=f"{curve.label}: {curve.mean[-1]:.4f} at {curve.tokens[-1]:,} tokens ({seeds})",
        lows=curve.low,
        highs=curve.high,
    )


def _parameters(rows: list[TrainingRow], style: Styles) -> list[Markup]:
    figures = []
    for name, curves in parameter_curves(rows).items():
        for curve in curves:
            title = f"{curve.label}: {name}"
            axes = Axes(title, "tokens read", name, "tokens", legend=False, small=True)
            chart = line_chart([_trace(curve, style)], axes)
            caption = element("figcaption", title)
            tags = {"data_method": curve.method, "data_variant": curve.label}
            figures.append((title, element("figure", caption, chart, **tags)))
    if not figures:
        return []
    grid = element("div", *(figure for _, figure in sorted(figures)), class_="kernels")
    summary = element("summary", f"Position parameters while they were learned ({len(figures)})")
    return [element("details", summary, grid, paragraphs([PARAMETER_NOTE]))]
