"""Print the tables of the attention benchmark from its rows.

Example: python scripts/bench_table.py results/bench/attention.jsonl --value ratio_to_sdpa --mode forward
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

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
            r["length"]: r[value] for r in rows if (r["method"], r["variant"]) == (method, variant)
        }
        texts = ["" if cells.get(at) is None else f"{cells[at]:.3g}" for at in lengths]
        lines.append(f"| {method} | {variant} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


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
    print(
        f"{options.mode}, {options.dtype}: {VALUES[options.value]}\n\n{table(rows, options.value)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
