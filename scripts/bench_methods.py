"""Time of one attention call with every position method, as a multiple of a method with a table.

What the method does to queries, keys and scores is counted, and its gates from the layer's input; what
it adds to embeddings is not, so methods that do only that are left out. Gates that are near 1 let no key
be left out: `flat` is the worst case of a gated method, `fresh` one that has learned nothing yet.

Example: python scripts/bench_methods.py fox fire --lengths 512 2048 --output bench.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_common as common  # first: it decides the number of threads
import torch
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.positions import PositionMethod, build, method_class, names, resolve

MODES = ("training", "forward")
HEADS, HEAD_DIM = 12, 64
COLUMNS = ("method", "gates", "tier", "mode", "length", "seconds", "ratio", "spread")


def make_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    acting = [name for name in names() if method_class(name).place == "attention"]
    made.add_argument("methods", nargs="*", default=acting, help="default: all that act there")
    made.add_argument("--against", default="kerple_log", help="the method with ratio 1")
    made.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    made.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    made.add_argument("--rounds", type=int, default=7, help="at most (7)")
    made.add_argument("--budget", type=float, default=60.0, help="seconds a comparison may take")
    made.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    made.add_argument("--show", type=Path, metavar="FILE", help="print the table of its lines")
    return made


def calls(name: str, length: int, training: bool) -> dict[str, Callable[[], object]]:
    """Kind of gates ("" without any) -> one call, with its backward when `training`."""
    method = build(
        name, heads=HEADS, head_dim=HEAD_DIM, hidden_size=HEADS * HEAD_DIM, max_length=length
    )
    method.train(training)
    generator = torch.Generator().manual_seed(1)
    shape = (1, HEADS, length, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    hidden = torch.randn(1, length, HEADS * HEAD_DIM, generator=generator)
    if not method.gated:
        return {"": lambda: once(method, (q, k, v), hidden, training, None)}
    return {
        kind: partial(once, method, (q, k, v), hidden, training, kind == "flat")
        for kind in ("fresh", "flat")
    }


def once(
    method: PositionMethod,
    qkv: tuple[Tensor, Tensor, Tensor],
    hidden: Tensor,
    training: bool,
    flat: bool | None,
) -> None:
    with torch.set_grad_enabled(training):
        q, k, v = (t.detach().requires_grad_(training) for t in qkv)
        gates = method.decay(hidden)
        if gates is not None and flat:
            gates = (gates[0] * 0.0, gates[1])
        given: dict[str, Any] = {} if gates is None else {"gates": gates}
        out = attend(q, k, v, method, impl="chunked", **given)
        if training:
            out.sum().backward()


def measure(
    name: str, against: str, length: int, mode: str, rounds: int, budget: float
) -> list[dict[str, Any]]:
    """A row for each kind of gates; the method with ratio 1 runs between the others."""
    training = mode == "training"
    work = calls(name, length, training)
    reference = next(iter(calls(against, length, training).values()))
    times = common.interleaved({**work, "against": reference}, rounds=rounds, budget=budget)
    rows = []
    for kind in work:
        each = [a / b for a, b in zip(times[kind], times["against"], strict=True)]
        rows.append(
            {
                "benchmark": "methods",
                "method": name,
                "gates": kind,
                "tier": method_class(name).tier,
                "mode": mode,
                "length": length,
                "against": against,
                "seconds": statistics.median(times[kind]),
                "against_seconds": statistics.median(times["against"]),
                "ratio": common.ratio(times[kind], times["against"]),
                "spread": max(each) - min(each),
                "rounds": len(each),
            }
        )
    return rows


def shown(rows: list[dict[str, Any]]) -> str:
    """One line a method and kind of gates, one column a mode and length."""
    cells = sorted(
        {(r["mode"], r["length"]) for r in rows}, key=lambda c: (MODES.index(c[0]), c[1])
    )
    lines: dict[tuple[str, str, str], dict[tuple[str, int], float]] = {}
    for row in rows:
        line = lines.setdefault((row["tier"], row["method"], row["gates"]), {})
        line[row["mode"], row["length"]] = row["ratio"]
    tiers = ("table", "positional", "content")
    ordered = sorted(lines, key=lambda key: (tiers.index(key[0]), key[1], key[2]))
    body = [
        [method, tier, gates, *(_two(lines[tier, method, gates].get(cell)) for cell in cells)]
        for tier, method, gates in ordered
    ]
    header = ["method", "tier", "gates", *(f"{mode} {length}" for mode, length in cells)]
    against = ", ".join(sorted({row["against"] for row in rows}))
    title = (
        f"CPU time of attention, {HEADS} heads of {HEAD_DIM}, one thread, in multiples of {against}"
    )
    return common.table(title, header, body)


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> int:
    arguments = make_parser().parse_args()
    if arguments.show is not None:
        text = arguments.show.read_text(encoding="utf-8")
        print(shown([json.loads(line) for line in text.splitlines()]), end="")
        return 0
    try:
        methods = [resolve(name) for name in arguments.methods]
        against = resolve(arguments.against)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if method_class(against).tier != "table" or method_class(against).place != "attention":
        print(f"error: --against {against} has no table of distances", file=sys.stderr)
        return 2
    rows = []
    for name in methods:
        for mode in arguments.modes:
            for length in arguments.lengths:
                found = measure(name, against, length, mode, arguments.rounds, arguments.budget)
                common.append(arguments.output, found)
                rows += found
                for row in found:
                    print(*(_cell(row[column]) for column in COLUMNS), sep="\t", flush=True)
    print(shown(rows))
    return 0


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
