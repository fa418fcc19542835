"""The report's parts on the models themselves: how they trained, and which kernels they learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.charts import kernel_chart
from megatron_patches.analysis.figures import kernel_groups
from megatron_patches.analysis.figures_reach import DEFINED, ENDLESS, steps_of
from megatron_patches.analysis.kernels import (
    THRESHOLD,
    UNEVEN,
    farthest,
    kernel_sets,
    reach_table,
    reaches,
)
from megatron_patches.analysis.line_charts import MOST_POINTS, THINNED, Axes, Trace, line_chart
from megatron_patches.analysis.markup import Markup, element, paragraphs, table_html
from megatron_patches.analysis.parts import Part, folded, refused
from megatron_patches.analysis.rows import KernelRow, RowError
from megatron_patches.analysis.training_curves import (
    Curve,
    loss_curves,
    parameter_curves,
    training_table,
    validation_curves,
)
from megatron_patches.analysis.training_rows import TrainingRow, training_groups

KERNEL_NOTE = "A line a head, paler the farther it reaches; a dot marks its effective length."
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
        row_tags=lambda label: {"data_method": methods[label]},
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
            figures.append((title, element("figure", caption, chart, data_method=curve.method)))
    if not figures:
        return []
    grid = element("div", *(figure for _, figure in sorted(figures)), class_="kernels")
    summary = element("summary", f"Position parameters while they were learned ({len(figures)})")
    return [element("details", summary, grid, paragraphs([PARAMETER_NOTE]))]


def kernel_parts(rows: Iterable[KernelRow], style: Styles) -> list[Part]:
    """Effective lengths and kernels of each data set and training length."""
    by_dataset: dict[str, list[KernelRow]] = {}
    for row in rows:
        by_dataset.setdefault(row.dataset, []).append(row)
    parts = []
    for dataset, own in sorted(by_dataset.items()):
        try:
            sets = kernel_sets(own)
        except RowError as error:
            parts.append(Part(f"{dataset}, learned kernels", dataset, [refused(error)]))
            continue
        for (_, length), kernels in sets.items():
            trained = "" if length is None else f", trained on {length} tokens"
            title = f"{dataset}, learned kernels{trained}"
            body = [*_reach(kernels, style), *_kernels(kernels, style)]
            parts.append(Part(title, dataset, body, None, length))
    return parts


def _reach(rows: Sequence[KernelRow], style: Styles) -> list[Markup]:
    biased = [row for row in rows if row.bias is not None]
    if not biased:
        return []
    limit = max(farthest(row) for row in biased)
    methods = {series_label(row, window=False): row.method for row in biased}
    traces = []
    for label, seeds in reaches(biased).items():
        at, _, mean = steps_of(list(seeds.values()), limit)
        heads = max(len(lengths) for lengths in seeds.values())
        tip = f"{label}: {mean[-1]:g} of {heads} heads end within {limit:,} tokens"
        index = style.get(label, 0)
        traces.append(Trace(label, methods[label], index, at, mean, tip, steps=True))
    axes = Axes(
        title="Heads with an effective length of at most d tokens",
        x="distance d (tokens)",
        y="heads",
        unit="tokens",
        logarithmic=True,
        zero=True,
    )
    notes = [DEFINED.format(threshold=THRESHOLD), ENDLESS.format(limit=f"{limit:,}")]
    notes += [UNEVEN] if any(row.searched_to is None for row in biased) else []
    chart = element(
        "figure",
        element("figcaption", f"{axes.title}, mean over seeds"),
        line_chart(traces, axes),
        paragraphs(notes),
    )
    table = table_html(
        reach_table(biased),
        row_tags=lambda label: {
            "data_method": methods[label.rpartition(f", {rows[0].dataset}")[0]]
        },
        column_tags=lambda column: {},
        known=[UNEVEN],
    )
    return [chart, table]


def _kernels(rows: Sequence[KernelRow], style: Styles) -> list[Markup]:
    """The kernels of the first seed, those of the others folded away."""
    parts = []
    for place, seed in enumerate(sorted({row.seed for row in rows})):
        figures = []
        for title, heads in kernel_groups(row for row in rows if row.seed == seed).items():
            caption = element("figcaption", f"{title}, seed {seed}")
            chart = kernel_chart(title, heads, style.get(series_label(heads[0]), 0))
            figures.append(element("figure", caption, chart, data_method=heads[0].method))
        grid = element("div", *figures, class_="kernels")
        if place:
            parts.append(element("details", element("summary", f"Kernels of seed {seed}"), grid))
        else:
            parts += [grid, paragraphs([KERNEL_NOTE])]
    return parts
