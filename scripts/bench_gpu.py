"""Triton attention with a position bias on a GPU: first is it right, then how fast is it.

The correctness part compares output and all gradients with the float64 oracle, for the methods to be
timed or those of `--check`, in float32 and bfloat16. A method that is wrong is a row that says so and is
not timed. `--minutes` counts from the start, compilation included. Variants:

    sdpa           torch's flash attention without a bias: the limit, and the unit of the ratios
    triton         our kernels; a closed form where the method has one
    triton-table   the same, always reading the table
    flex           FlexAttention, compiled, looking up the same table
    dense          torch's attention with a dense mask, built in every call
    flash-attn     its ALiBi, for methods with a linear closed form, where the package is installed

Example: python scripts/bench_gpu.py kerple_log alibi --minutes 8 --output results/bench/gpu.jsonl
Without a GPU: python scripts/bench_gpu.py --dry-run   (the correctness part, interpreted, toy size)
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_common as common  # puts the repository on the path
import torch
from bench_gpu_variants import LONGEST, VARIANTS, Inputs, Work, make_inputs, make_method
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.attention import triton as ours
from megatron_patches.attention.problem import Problem
from megatron_patches.positions import names

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, LONGEST]
METHODS = ["kerple_log", "kerple_power", "alibi", "rpe"]
MODES = ("forward", "training")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of the largest number of each tensor. The backward reads the output rounded to bf16, and a parameter's
# gradient sums over all scores what that rounding did to each.
TOLERANCE = {"fp32": 2e-5, "bf16": 5e-2}
AGREE = 3e-2  # what is timed must compute the same, in bfloat16
CHECKED_LENGTH = 2048  # longest at which outputs of the variants are compared
SECONDS = 0.1  # of one reading


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", default=METHODS, help=f"to time; default: {METHODS}")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help=f"{LENGTHS}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384, help="batch x length (16384)")
    parser.add_argument("--rounds", type=int, default=5, help="readings of every variant (5)")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for everything (10)")
    parser.add_argument(
        "--check", nargs="+", metavar="METHOD", help="to compare first; default: those to time"
    )
    parser.add_argument("--dry-run", action="store_true", help="correctness on the CPU, toy size")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    return parser


# ---- is it right ---------------------------------------------------------------------------------


def outcome(x: Inputs, work: Callable[[Problem], Tensor]) -> list[Tensor]:
    """The output and the gradients of everything that learns."""
    out = work(x.problem.transform())
    grads = torch.autograd.grad(out, x.leaves, x.grad_out, materialize_grads=True)
    return [out.detach(), *grads]


def oracle(problem: Problem) -> Tensor:
    window = problem.sight.window
    qkv = (problem.q, problem.k, problem.v)
    return attend(*qkv, problem.method, impl="reference", window=window, transformed=True)


def mistakes(name: str, device: str, shape: tuple[int, int, int, int]) -> list[str]:
    """One line for every dtype, window and way to the bias in which a method is wrong or fails."""
    found = []
    for dtype, window in itertools.product(DTYPES, (None, shape[2] // 3)):
        at = f"{name} {dtype} window={window}"
        try:
            found += [f"{at} {what}" for what in wrong(name, device, shape, dtype, window)]
        except Exception as error:  # compilers raise whatever they like
            found.append(f"{at}: {told(error)}")
    return found


def wrong(
    name: str, device: str, shape: tuple[int, int, int, int], dtype: str, window: int | None
) -> list[str]:
    x = make_inputs(name, shape, DTYPES[dtype], device, window=window)
    q, k, v = (t.detach().double().requires_grad_() for t in x.qkv)
    method = make_method(name, shape[1], shape[3]).to_float64_().to(device)
    exact = Inputs(Problem(q, k, v, method, x.problem.scale, x.problem.sight), x.grad_out.double())
    expected = outcome(exact, oracle)
    ways = (True,) if x.problem.method.closed_form() is None else (True, False)
    found = []
    for closed_form in ways:
        found_here = outcome(x, partial(ours.run, closed_form=closed_form))
        for index, (mine, theirs) in enumerate(zip(found_here, expected, strict=True)):
            error = float((mine.double() - theirs).abs().max())
            error /= max(1.0, float(theirs.abs().max()))
            if not error <= TOLERANCE[dtype]:  # NaN is a mistake
                what = ["output", *"qkv"][index] if index < 4 else f"parameter {index - 4}"
                way = "closed form" if closed_form else "table"
                found.append(f"{way}: {what} is off by {error:.2g}")
    return found


def told(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check(arguments: argparse.Namespace, late: Callable[[], bool]) -> list[str]:
    """The methods that are wrong; each is a row of the output as soon as it is known."""
    place = ("cpu", (1, 2, 40, 16)) if arguments.dry_run else ("cuda", (2, 4, 333, 64))
    bad = []
    for name in arguments.check or arguments.methods:
        if late():
            print(f"- out of time: {name} not compared")
            bad.append(name)  # what nobody compared is not timed
            continue
        lines = mistakes(name, *place)
        row = {"benchmark": "gpu", "variant": "triton", "method": name, "mode": "check"}
        common.append(arguments.output, [{**row, "mistakes": lines}])
        print("\n".join(lines) if lines else f"{name} agrees with the float64 oracle", flush=True)
        bad += [name] if lines else []
    return bad


# ---- how fast is it ------------------------------------------------------------------------------


def once(x: Inputs, work: Work, mode: str) -> Tensor:
    """One forward, or one forward and backward with all gradients."""
    if mode == "forward":
        with torch.no_grad():
            return work()
    out = work()
    torch.autograd.grad(out, x.leaves, x.grad_out, allow_unused=True)
    return out.detach()


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Mean time of a call on the device."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(repeats):
        call()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / repeats


def prepare(x: Inputs, variant: str, mode: str, expected: Tensor | None) -> dict[str, Any]:
    """Warm up, compare, measure memory; the call and its number of repeats, or why it is skipped."""
    try:
        work = VARIANTS[variant](x)
        out = once(x, work, mode)  # compiles
        if expected is not None and variant != "sdpa":
            error = float((out.double() - expected.double()).abs().max())
            if not error <= AGREE * max(1.0, float(expected.abs().max())):
                return {"skipped": f"computes something else: off by {error:.2g}"}
        del out
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once(x, work, mode)
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        repeats = max(1, round(SECONDS / seconds(lambda: once(x, work, mode), 2)))
    except Exception as error:  # out of memory, no support, no compiler, a compiler's own errors
        return {"skipped": told(error)}
    return {"call": lambda: once(x, work, mode), "repeats": repeats, "peak_mb": peak}


def agreed(x: Inputs) -> Tensor | None:
    """What all variants shall compute: the triton kernel's output, which was compared; None if it fails."""
    try:
        return once(x, VARIANTS["triton"](x), "forward")
    except Exception:
        return None  # its own row says why


def cell(
    name: str, length: int, mode: str, arguments: argparse.Namespace, late: Callable[[], bool]
) -> list[dict[str, Any]]:
    """A row a variant: seconds, ratio to sdpa, TFLOP/s, peak memory above the inputs."""
    batch = max(1, arguments.tokens // length)
    shape = (batch, arguments.heads, length, arguments.head_dim)
    x = make_inputs(name, shape, torch.bfloat16, "cuda")
    expected = agreed(x) if length <= CHECKED_LENGTH else None
    ready: dict[str, dict[str, Any]] = {}
    for variant in VARIANTS:
        out_of_time = {"skipped": "out of time"}
        ready[variant] = out_of_time if late() else prepare(x, variant, mode, expected)
    running = [variant for variant in VARIANTS if "call" in ready[variant]]
    times: dict[str, list[float]] = {variant: [] for variant in running}
    shuffle = random.Random(0)
    for _ in range(arguments.rounds):
        for variant in shuffle.sample(running, len(running)):
            times[variant].append(seconds(ready[variant]["call"], ready[variant]["repeats"]))
    # Causal: half of the scores; backward counts 2.5 forwards, as is usual for flash attention.
    operations = 2.0 * batch * arguments.heads * length**2 * arguments.head_dim
    operations *= 3.5 if mode == "training" else 1.0
    rows = []
    for variant in VARIANTS:
        row: dict[str, Any] = {"benchmark": "gpu", "gpu": torch.cuda.get_device_name()}
        row |= {"method": name, "length": length, "batch": batch, "mode": mode, "dtype": "bf16"}
        row |= {"heads": arguments.heads, "head_dim": arguments.head_dim, "variant": variant}
        if variant in running:
            median = statistics.median(times[variant])
            row |= {"seconds": median, "tflops": operations / median / 1e12}
            row |= {"peak_mb": ready[variant]["peak_mb"], "rounds": len(times[variant])}
            if "sdpa" in running:
                row["ratio_to_sdpa"] = common.ratio(times[variant], times["sdpa"])
        else:
            row["skipped"] = ready[variant]["skipped"]
        rows.append(row)
    return rows


def report(rows: list[dict[str, Any]], title: str) -> str:
    lengths = dict.fromkeys(row["length"] for row in rows)
    columns = {"ratio_to_sdpa": "time / sdpa", "tflops": "TFLOP/s", "peak_mb": "peak MB"}
    text = ""
    for key, meaning in columns.items():
        lines = [[n, *(r.get(key) for r in rows if r["length"] == n)] for n in lengths]
        text += common.table(f"{title}: {meaning}", ["length", *VARIANTS], lines) + "\n"
    reasons = {f"{r['variant']} at {r['length']}: {r['skipped']}" for r in rows if "skipped" in r}
    return text + "".join(f"- {reason}\n" for reason in sorted(reasons))


def main() -> int:
    begun = time.monotonic()
    arguments = make_parser().parse_args()
    for name in [*arguments.methods, *(arguments.check or [])]:
        if name not in names() or make_method(name, 1, 16).table(1) is None:
            print(f"error: {name!r} is no method with a table of biases", file=sys.stderr)
            return 2
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported
    elif not torch.cuda.is_available():
        print("error: no CUDA device; --dry-run interprets the kernels", file=sys.stderr)
        return 2

    def late() -> bool:
        return bool(time.monotonic() - begun > 60 * arguments.minutes)

    device = "cpu" if arguments.dry_run else "cuda"
    reason = ours.refuses(make_inputs("none", (2, 4, 333, 64), torch.float32, device).problem)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    bad = check(arguments, late)
    print(f"compared after {time.monotonic() - begun:.0f} s\n", flush=True)
    if arguments.dry_run:
        return 1 if bad else 0
    right = [name for name in arguments.methods if name not in bad]
    for name, mode in itertools.product(right, arguments.modes):
        rows: list[dict[str, Any]] = []
        for length in sorted(arguments.lengths):
            if late():
                print(f"- out of time: {name}, {mode}, length {length} not measured")
                continue
            try:
                found = cell(name, length, mode, arguments, late)
            except Exception as error:  # no memory for the inputs, or a broken device
                failed = {"benchmark": "gpu", "method": name, "length": length, "mode": mode}
                common.append(arguments.output, [{**failed, "failed": told(error)}])
                print(f"- {name}, {mode}, length {length}: {told(error)}", flush=True)
                bad.append(name)
                continue
            common.append(arguments.output, found)
            rows += found
        if rows:
            print(report(rows, f"{name}, bf16, {mode}"), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
