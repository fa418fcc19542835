"""The report's parts that set one way of scoring beside another: controls, sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.early import MAY_DIFFER, SIDE_BY_SIDE, SLIDING, early_table
from megatron_patches.analysis.line_charts import Axes, Trace, line_chart
from megatron_patches.analysis.markup import Markup, Tags, element, paragraphs, table_html
from megatron_patches.analysis.parts import Part, refused
from megatron_patches.analysis.positions import (
    PositionLine,
    binning,
    position_lengths,
    position_lines,
)
from megatron_patches.analysis.rows import COMPARED_FIELDS, Row, RowError
from megatron_patches.analysis.undrawn import position_notes

CONTROLS = "pale and thin: the same weights, each token attending to the width of the window only"


def position_figures(rows: list[Row], style: Mapping[str, int]) -> list[Markup]:
    """Loss by position at each length that has it, and the difference to windowed controls."""
    figures = []
    for length in position_lengths(rows):
        lines = position_lines(rows, length)
        marks = [(float(rows[0].train_length), f"trained on {rows[0].train_length}")]
        axes = Axes(
            title=f"Loss by position, window of {length} tokens",
            x="position in the window (tokens)",
            y="loss (nats per token)",
            unit="tokens",
            logarithmic=True,
            marks=marks,
        )
        charts = [
            line_chart([_trace(line, line.losses, style, line.window) for line in lines], axes)
        ]
        surplus = [line for line in lines if line.surplus is not None]
        if surplus:
            name = (
                f"Loss with an attention window minus loss without, {length} tokens: above 0, the text "
                "beyond the window helps"
            )
            traces = [_trace(line, line.surplus or [], style, None) for line in surplus]
            difference = Axes(
                name, axes.x, "difference (nats per token)", "tokens", True, marks, zero=True
            )
            charts += [element("p", name), line_chart(traces, difference)]
        caption = element("figcaption", f"{axes.title}, {rows[0].dataset}")
        notes = [f"mean over seeds; {binning(row for row in rows if row.eval_length == length)}"]
        notes += [CONTROLS] if any(line.window for line in lines) else []
        told = paragraphs([*notes, *position_notes(rows, length)])
        figures.append(element("figure", caption, *charts, told, data_length=str(length)))
    return figures


def _trace(
    line: PositionLine, values: Sequence[float], style: Mapping[str, int], window: int | str | None
) -> Trace:
    seeds = f"{line.seeds} seed" + ("s" if line.seeds > 1 else "")
    return Trace(
        label=line.label,
        method=line.method,
        index=style[line.base],
        xs=line.positions,
        ys=values,
        tip=f"{line.label}: {values[-1]:.4f} at {line.positions[-1]:g} tokens ({seeds})",
        control=window is not None,
    )


def early_parts(rows: Iterable[Row]) -> list[Part]:
    """The early-token effect of each text and training that both protocols have scored."""
    groups: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for row in rows:
        if row.protocol in (SIDE_BY_SIDE, SLIDING):
            names = [name for name in COMPARED_FIELDS if name not in MAY_DIFFER]
            key = tuple(str(getattr(row, name)) for name in names)
            groups.setdefault(key, {}).setdefault(row.protocol, []).append(row)
    parts = []
    for _, found in sorted(groups.items()):
        if len(found) == 2:
            side, sliding = found[SIDE_BY_SIDE], found[SLIDING]
            for _, moved in sorted(_apart(sliding).items()):
                parts.append(_early_part(list(_apart(side).values()), moved))
    return parts


def _apart(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows that may meet: one text, and one stride where windows are not side by side."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        stride = 0 if row.protocol == SIDE_BY_SIDE else row.stride
        found.setdefault((row.data, stride), []).append(row)
    return found


def _early_part(texts: Sequence[list[Row]], sliding: list[Row]) -> Part:
    """Sliding rows beside those of ``texts`` that turn out to be of the same text."""
    first, shown, reasons = sliding[0], [], []
    for side in texts:
        try:
            table = early_table([*side, *sliding])
        except RowError as error:
            reasons.append(refused(error))
            continue
        methods = {series_label(row): row.method for row in [*side, *sliding]}
        shown.append(table_html(table, row_tags=_tags(methods), column_tags=lambda column: {}))
    title = (
        f"{first.dataset}, early-token effect, stride {first.stride}, split {first.split}, trained on "
        f"{first.train_length} tokens for {first.step} steps"
    )
    protocols = f"{SIDE_BY_SIDE} {SLIDING}"
    return Part(title, first.dataset, shown or reasons, protocols, first.train_length)


def _tags(methods: Mapping[str, str]) -> Callable[[str], Tags]:
    def tags(label: str) -> Tags:
        name, _, length = label.rpartition(", ")
        return {"data_method": methods[name], "data_variant": name, "data_length": length}

    return tags
