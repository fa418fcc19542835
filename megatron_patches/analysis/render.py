"""A ``Table`` as text: Markdown, LaTeX (booktabs), or CSV with one line a cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace

from megatron_patches.analysis.jsonl import plain
from megatron_patches.analysis.layout import Cell, Table


def to_markdown(table: Table) -> str:
    """GitHub Markdown: a heading, what was measured, the table, footnotes."""
    lines = [f"### {_markdown(table.title)}", ""]
    if table.header:
        # Two spaces at the end of a line keep the lines of a paragraph apart.
        lines += ["  \n".join(_markdown(line) for line in table.header), ""]
    lines.append("| " + " | ".join(_markdown(c) for c in (table.corner, *table.columns)) + " |")
    lines.append("|---|" + "---:|" * len(table.columns))
    for label, cells in table.rows:
        shown = [_markdown(label), *(_markdown_cell(cell) for cell in cells)]
        lines.append("| " + " | ".join(shown) + " |")
    if table.notes:
        lines += ["", "  \n".join(_markdown(note) for note in table.notes)]
    return "\n".join(lines) + "\n"


def _markdown_cell(cell: Cell) -> str:
    text = _markdown(cell.text + (f"±{cell.spread}" if cell.spread else ""))
    marks = " ".join(cell.marks)
    space = " " if marks.startswith("[") else ""
    return (f"**{text}**" if cell.bold else text) + space + _markdown(marks)


def _markdown(text: str) -> str:
    # Underscores inside a word are literal in GitHub Markdown, so method names stay readable.
    for character in "\\`*|<":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def to_latex(table: Table) -> str:
    """A ``table`` float that needs the booktabs package; header and notes below the rules."""
    columns = " & ".join(_latex(c) for c in (table.corner, *table.columns))
    body = [
        " & ".join([_latex(label), *(_latex_cell(cell) for cell in cells)]) + r" \\"
        for label, cells in table.rows
    ]
    small = [rf"{_latex(line)}\par" for line in (*table.header, *table.notes)]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(table.title)}}}",
            rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
            r"\toprule",
            columns + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\par\medskip\footnotesize\raggedright",
            *small,
            r"\end{table}",
            "",
        ]
    )


def _latex_cell(cell: Cell) -> str:
    text = _latex(cell.text + (f"±{cell.spread}" if cell.spread else ""))
    if cell.bold:
        # \boldmath reaches the plus-minus sign, which stands in math mode.
        text = rf"\textbf{{\boldmath {text}}}"
    marks = "".join(_latex(mark) for mark in cell.marks)
    return text + (rf"\textsuperscript{{{marks}}}" if marks else "")


_LATEX = {
    **{character: "\\" + character for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"±": r"$\pm$", "×": r"$\times$", "–": "--", "†": r"$\dagger$", "‡": r"$\ddagger$"},
    **{"Δ": r"$\Delta$"},
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def to_csv(table: Table) -> str:
    """One line a cell, full precision; ``source`` repeats what was measured on every line."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["table", table.corner, "column", "text", "mean", "std", "seeds", "best", "marks", "source"]
    )
    source = "; ".join((*table.header, *table.notes))
    for label, cells in table.rows:
        for column, whole in zip(table.columns, cells, strict=True):
            for name, cell in _csv_cells(column, whole):
                numbers = ["" if value is None else repr(value) for value in (cell.mean, cell.std)]
                best = "yes" if cell.bold else ""
                marks = " ".join(cell.marks)
                writer.writerow(
                    [
                        *(table.title, label, name, cell.text, *numbers),
                        *(cell.seeds or "", best, marks, source),
                    ]
                )
    return stream.getvalue()


def _csv_cells(column: str, cell: Cell) -> list[tuple[str, Cell]]:
    """The cell under its column, or a range as two cells, so that both ends keep full precision."""
    if cell.interval is None:
        return [(column, cell)]
    ends = zip(("low", "high"), cell.interval, strict=True)
    return [(f"{column}, {name}", replace(cell, mean=end)) for name, end in ends]


FORMATS: dict[str, Callable[[Table], str]] = {
    "markdown": lambda table: plain(to_markdown(table)),
    "latex": lambda table: plain(to_latex(table)),
    "csv": lambda table: plain(to_csv(table)),
}
