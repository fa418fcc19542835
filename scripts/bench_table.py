"""Print the tables of the attention benchmark from its rows.

Example: python scripts/bench_table.py results/bench/attention.jsonl --value ratio_to_sdpa --mode forward
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_patches.analysis import style  # noqa: E402

VALUES = {
    "ratio_to_sdpa": "CPU time, causal attention without a bias = 1",
    "speedup_over_authors": "times faster than a dense bias in every layer",
    "peak_mb": "peak memory above the inputs, MB",
}


def read(path: Path) -> list[dict[str, Any]]:
    """The last row of every cell: later measurements replace earlier ones."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows[tuple(row[k] for k in ("method", "length", "dtype", "mode", "variant"))] = row
    return list(rows.values())


def table(rows: list[dict[str, Any]], value: str) -> str:
    """Methods and variants by length, as Markdown; empty cells were not measured."""
    lengths = sorted({row["length"] for row in rows})
    lines = [
        "| method | variant | " + " | ".join(map(str, lengths)) + " |",
        "|---|---|" + "---:|" * len(lengths),
    ]
    seen = dict.fromkeys((row["method"], row["variant"]) for row in rows)
    for method, variant in seen:
        cells = {
            r["length"]: r.get(value)
            for r in rows
            if (r["method"], r["variant"]) == (method, variant)
        }
        texts = ["" if cells.get(at) is None else f"{cells[at]:.3g}" for at in lengths]
        lines.append(f"| {method} | {variant} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], value: str, stem: Path) -> None:
    """The same as curves over the length, one a method and variant; SVG and PNG."""
    import matplotlib as mpl

    series = dict.fromkeys((row["method"], row["variant"]) for row in rows)
    names = [f"{method}, {variant}" for method, variant in series]
    with mpl.rc_context(style.STYLE):
        figure, (axes,) = style.panels(1, names)
        for number, ((method, variant), name) in enumerate(zip(series, names, strict=True)):
            points = sorted(
                (row["length"], row[value])
                for row in rows
                if (row["method"], row["variant"]) == (method, variant)
                and row.get(value) is not None
            )
            axes.plot(*zip(*points, strict=True), **style.line_style(number))
            axes.annotate(name, points[-1], xytext=(6, -3), textcoords="offset points")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("length (tokens)")
        axes.set_title(VALUES[value])
        style.save(figure, stem)


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("rows", type=Path)
    made.add_argument("--value", choices=VALUES, default="ratio_to_sdpa")
    made.add_argument("--mode", default="forward", help="forward or training")
    made.add_argument("--dtype", default="fp32")
    made.add_argument("--variants", nargs="+", default=["chunked"])
    made.add_argument("--methods", nargs="+")
    made.add_argument("--figure", type=Path, metavar="STEM", help="draw STEM.svg and STEM.png, too")
    options = made.parse_args()
    rows = [
        row
        for row in read(options.rows)
        if (row["mode"], row["dtype"]) == (options.mode, options.dtype)
        and row["variant"] in options.variants
        and (options.methods is None or row["method"] in options.methods)
    ]
    if not rows:
        print("error: no such rows", file=sys.stderr)
        return 1
    if options.figure is not None:
        draw(rows, options.value, options.figure)
    print(
        f"{options.mode}, {options.dtype}: {VALUES[options.value]}\n\n{table(rows, options.value)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
