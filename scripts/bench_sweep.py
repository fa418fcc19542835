"""How much faster a sweep trains independent runs side by side than one after another.

The same short runs, through scripts/sweep.py each time: one at a time with a thread a core, which is
what starting them by hand gives, and side by side, as the sweep does by itself. Wall-clock time,
because that is what running side by side saves: the machine must be idle otherwise. The share of the
cores that was busy stands beside it.

Needs data/local_code (python -m data_prep local_code).

Example: python scripts/bench_sweep.py --rounds 3 --output results/bench/sweep.jsonl
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_common as common  # first: it decides the number of threads

TARGET = 1.6
STUDY = """
base: tiny
cluster: cpu
overrides: {{train_iters: {steps}, checkpoint_factor: {steps}, eval_interval: {steps}}}
methods: [{methods}]
datasets: [local_code]
seeds: [1234]
train_lengths: [512]
eval: {{lengths: [512, 1024], max_tokens: 8193}}
output: {{folder}}/rows
checkpoints: {{folder}}/runs
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    methods = ["alibi", "kerple_log", "kerple_power", "none"]
    parser.add_argument("methods", nargs="*", default=methods, help=f"default: {methods}")
    parser.add_argument("--steps", type=int, default=100, help="a run (100)")
    parser.add_argument("--rounds", type=int, default=2, help="of all variants in turn (2)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    return parser


def sweep(study: str, options: list[str]) -> dict[str, float]:
    """Wall seconds of one whole sweep in a folder of its own, and the share of the cores in use."""
    # The benchmarks' own single thread is not the sweep's.
    environment = {key: os.environ[key] for key in os.environ if not key.endswith("NUM_THREADS")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yml"
        file.write_text(study.replace("{folder}", folder), encoding="utf-8")
        command = [sys.executable, "scripts/sweep.py", str(file), *options]
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            command, cwd=common.ROOT, env=environment, capture_output=True, text=True
        )
        seconds = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed: {done.stderr or done.stdout}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "busy": used / seconds / (os.cpu_count() or 1)}


def main() -> int:
    arguments = make_parser().parse_args()
    study = STUDY.format(steps=arguments.steps, methods=", ".join(arguments.methods))
    variants = {"one at a time": ["--parallel", "1"], "side by side": []}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        for name, options in variants.items():
            found[name].append(sweep(study, options))
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    ratio = median["one at a time"]["seconds"] / median["side by side"]["seconds"]
    title = f"{len(arguments.methods)} runs of {arguments.steps} steps, target ratio >= {TARGET}"
    lines = [[name, item["seconds"], item["busy"]] for name, item in median.items()]
    print(common.table(title, ["sweep", "seconds", "share of the cores busy"], lines))
    print(f"side by side is {ratio:.2f} times as fast")
    row = {
        "benchmark": "sweep",
        "runs": len(arguments.methods),
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "seconds": {name: item["seconds"] for name, item in median.items()},
        "busy": {name: item["busy"] for name, item in median.items()},
        "ratio": ratio,
    }
    common.append(arguments.output, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
