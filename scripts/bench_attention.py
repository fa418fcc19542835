"""Time and memory of attention with a position bias, against the alternatives.

    chunked   this suite's attention, linear in memory
    sdpa      torch's causal attention without any bias: the limit
    authors   the KERPLE authors' way: a dense bias in every layer, scores, -10000, softmax
    dense     torch's attention with a dense mask

Example: python scripts/bench_attention.py kerple_log --lengths 512 2048 --output bench.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import bench_common as common  # first: it decides the number of threads
import torch
from bench_attention_variants import (
    VARIANTS,
    Inputs,
    Oracle,
    gradients,
    make_inputs,
    needed_bytes,
)

from megatron_patches.positions import names

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("forward", "training")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ["kerple_log", "kerple_power", "alibi", "rpe"]
    parser.add_argument("methods", nargs="*", default=default, help=f"default: {default}")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=7, help="at most (7)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds a cell may take (60)")
    parser.add_argument("--quick", action="store_true", help="lengths 512 and 1024, 3 rounds")
    parser.add_argument("--no-memory", action="store_true", help="skip the peak memory")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)  # one cell in a fresh process
    return parser


def runs(x: Inputs, training: bool, variants: list[str]) -> dict[str, Any]:
    """Variant -> a call that does one forward, or one forward and backward."""
    grad_out = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(4)).to(x.q.dtype)

    def make(name: str) -> Any:
        work = VARIANTS[name](x)

        def once() -> None:
            out = work(x)
            if training:
                gradients(x, out, grad_out)

        return once

    return {name: make(name) for name in variants}


def peak(variant: str, method: str, length: str, dtype: str, mode: str) -> float:
    """Peak memory of one call above its inputs, MB; only meaningful in a fresh process."""
    training = mode == "training"
    with torch.set_grad_enabled(training):
        # A short call first: libraries take their own memory when they are first used.
        runs(make_inputs(method, 64, DTYPES[dtype], training), training, [variant])[variant]()
        x = make_inputs(method, int(length), DTYPES[dtype], training)
        # A mask built beforehand counts, too.
        return common.peak_megabytes(lambda: runs(x, training, [variant])[variant]())


def cell(
    method: str, length: int, dtype: str, mode: str, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row a variant: seconds, error, peak memory; a variant that does not fit says so."""
    training = mode == "training"
    free = common.available_bytes() / 2  # leave room for others
    wanted = {v: needed_bytes(v, length, DTYPES[dtype], training) for v in VARIANTS}
    fitting = [variant for variant in VARIANTS if wanted[variant] < free]
    with torch.set_grad_enabled(training):
        x = make_inputs(method, length, DTYPES[dtype], training)
        oracle = Oracle(x, training)
        errors = {name: oracle.check(name, VARIANTS[name](x)) for name in fitting}
        del oracle
        times = common.interleaved(
            runs(x, training, fitting), rounds=arguments.rounds, budget=arguments.budget
        )
    rows = []
    for variant in VARIANTS:
        row: dict[str, Any] = {"benchmark": "attention", "method": method, "length": length}
        row |= {"dtype": dtype, "mode": mode, "variant": variant}
        if variant not in fitting:
            gigabytes = wanted[variant] / 2**30
            rows.append({**row, "skipped": f"needs about {gigabytes:.0f} GB of memory"})
            continue
        row |= {"seconds": statistics.median(times[variant]), "rounds": len(times[variant])}
        row |= {"ratio_to_sdpa": common.ratio(times[variant], times["sdpa"])}
        if "authors" in times:
            row["speedup_over_authors"] = common.ratio(times["authors"], times[variant])
        row["error"] = errors[variant]
        if not arguments.no_memory:
            found = common.in_subprocess(__file__, ["--peak", variant, method, length, dtype, mode])
            row["peak_mb"] = found["peak_mb"]
        rows.append(row)
    return rows


def report(rows: list[dict[str, Any]], method: str, dtype: str, mode: str) -> str:
    """One table of a method, dtype and mode: a line for each length."""
    header = ["length", *(f"{v} / sdpa" for v in VARIANTS if v != "sdpa"), "authors / chunked"]
    header += [f"MB {v}" for v in VARIANTS]
    lines = []
    for length in dict.fromkeys(row["length"] for row in rows):
        by = {row["variant"]: row for row in rows if row["length"] == length}
        line: list[object] = [length]
        line += [by[v].get("skipped") or by[v]["ratio_to_sdpa"] for v in VARIANTS if v != "sdpa"]
        line.append(by["chunked"].get("speedup_over_authors"))
        line += [by[v].get("peak_mb") for v in VARIANTS]
        lines.append(line)
    return common.table(f"{method}, {dtype}, {mode}", header, lines)


def main() -> int:
    arguments = make_parser().parse_args()
    if arguments.peak:
        print(json.dumps({"peak_mb": peak(*arguments.peak)}))
        return 0
    if arguments.quick:
        arguments.lengths, arguments.rounds = [512, 1024], 3
    for method in arguments.methods:
        if method not in names():
            print(f"error: {method!r} is none of {', '.join(names())}", file=sys.stderr)
            return 2
    for method in arguments.methods:
        for dtype in arguments.dtypes:
            for mode in arguments.modes:
                rows: list[dict[str, Any]] = []
                for length in arguments.lengths:
                    try:
                        found = cell(method, length, dtype, mode, arguments)
                    except (ValueError, RuntimeError) as error:
                        print(f"error: {error}", file=sys.stderr)
                        return 1
                    common.append(arguments.output, found)
                    rows += found
                print(report(rows, method, dtype, mode), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
