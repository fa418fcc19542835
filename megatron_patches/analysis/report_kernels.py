"""The report's parts on learned kernels: effective lengths, and bias and weight of each head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.charts import kernel_chart
from megatron_patches.analysis.figures_kernels import DOTS, SHADES, kernel_panels
from megatron_patches.analysis.figures_reach import ENDLESS, steps_of
from megatron_patches.analysis.kernels import (
    DEFINED,
    THRESHOLD,
    KernelSet,
    check_runs,
    described,
    farthest,
    kernel_sets,
    reaches,
)
from megatron_patches.analysis.line_charts import Axes, Trace, line_chart
from megatron_patches.analysis.markup import Markup, element, paragraphs, table_html
from megatron_patches.analysis.parts import Part, refused
from megatron_patches.analysis.reach_table import reach_notes, reach_table
from megatron_patches.analysis.rows import KernelRow, RowError

Styles = Mapping[str, int]  # label -> number of its colour and dashes on the page


def kernel_parts(rows: Iterable[KernelRow], style: Styles) -> list[Part]:
    """Effective lengths and kernels of each data set, training length, step and size of the model."""
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
        words = described(sets)
        parts += [_part(key, kernels, words[key], style) for key, kernels in sets.items()]
    return parts


def _part(key: KernelSet, kernels: list[KernelRow], words: str, style: Styles) -> Part:
    told = words.removeprefix(key.dataset)
    if key.train_length is not None:
        told = told.replace(
            f"trained on {key.train_length}", f"trained on {key.train_length} tokens"
        )
    title = f"{key.dataset}, learned kernels{told}"
    try:
        check_runs(kernels)
        body = [*_reach(kernels, style), *_kernels(kernels, style)]
    except RowError as error:
        body = [refused(error)]
    return Part(title, key.dataset, body, None, key.train_length)


def _reach(rows: Sequence[KernelRow], style: Styles) -> list[Markup]:
    biased = [row for row in rows if row.bias is not None]
    if not biased:
        return []
    limit = max(farthest(row) for row in biased)
    methods = {series_label(row, window=False): row.method for row in biased}
    traces = []
    found = reaches(biased)
    for label, seeds in found.items():
        at, _, mean = steps_of(list(seeds.values()), limit)
        heads = max(len(lengths) for lengths in seeds.values())
        count = f"{len(seeds)} seed" + ("s" if len(seeds) > 1 else "")
        tip = f"{label}: {mean[-1]:g} of {heads} heads end within {limit:,} tokens ({count})"
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
    known = reach_notes(biased)
    notes = [DEFINED.format(threshold=THRESHOLD), ENDLESS.format(limit=f"{limit:,}"), *known]
    chart = element(
        "figure",
        element("figcaption", f"{axes.title}, mean over seeds"),
        line_chart(traces, axes),
        paragraphs(notes),
    )
    reach = reach_table(biased)
    # All rows are of one set, so the lines are the labels in order.
    of_line = dict(zip((name for name, _ in reach.rows), found, strict=True))
    table = table_html(
        reach,
        row_tags=lambda line: {
            "data_method": methods[of_line[line]],
            "data_variant": of_line[line],
        },
        column_tags=lambda column: {},
        known=known,
    )
    return [chart, table]


def _kernels(rows: Sequence[KernelRow], style: Styles) -> list[Markup]:
    """The kernels of the first seed, those of the others folded away."""
    parts = []
    for place, seed in enumerate(sorted({row.seed for row in rows})):
        figures = []
        for panel in kernel_panels(row for row in rows if row.seed == seed):
            label = series_label(panel.heads[0], window=False)
            caption = element("figcaption", f"{panel.title}, seed {seed}")
            tags = {"data_method": panel.heads[0].method, "data_variant": label}
            chart = kernel_chart(panel, style.get(label, 0))
            figures.append(element("figure", caption, chart, **tags))
        grid = element("div", *figures, class_="kernels")
        if place:
            parts.append(element("details", element("summary", f"Kernels of seed {seed}"), grid))
        else:
            dots = DOTS.format(defined=DEFINED.format(threshold=THRESHOLD))
            parts += [grid, paragraphs([SHADES, dots])]
    return parts
