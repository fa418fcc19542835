"""Seconds from a command to its first logged step, and what the imports take of them.

Each command trains `configs/base/tiny.yml` on random tokens for two steps; the clock stops when
log.jsonl has its first row. On a busy machine it measures the neighbours, too; the processor's time, of
both steps and all processes of a command, is less disturbed. The median over fresh processes counts,
after one that warms the disk's cache. The profile is Python's own (`-X importtime`) of `train.py`: the
time of each package's own modules, and the largest of one of them with all that it was the first to
import.

Example: python scripts/bench_startup.py --rounds 5 --output results/bench/startup.jsonl
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_common as common  # first: it decides the number of threads
from bench_training import MODELS, make_config

from megatron_patches.config import Config, dump

TARGET = 12.0
POLL = 0.01
PATIENCE = 300.0
DEAREST = 10
WITHOUT_MODEL = ("deepy.py", "train.py", "eval.py", "generate.py", "scripts/tables.py")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each command (5)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    return parser


def first_row(command: Sequence[str], log: Path) -> tuple[float, float]:
    """Seconds until `log` has a line, and the processor's seconds of the whole command.

    Raises RuntimeError when the command fails or is too slow.
    """
    begun, used = time.perf_counter(), _children()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = None
    while seconds is None and child.poll() is None and time.perf_counter() - begun < PATIENCE:
        if log.exists() and b"\n" in log.read_bytes():
            seconds = time.perf_counter() - begun
        time.sleep(POLL)
    if seconds is None:
        child.kill()
    shown, _ = child.communicate()
    if seconds is None or child.returncode:
        raise RuntimeError(f"{' '.join(command)} failed or never logged a step: {shown[-2000:]}")
    return seconds, _children() - used


def _children() -> float:
    """The processor's seconds of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def starts(folder: Path, config: Config, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Both ways of starting in turn; the first turn warms up and does not count."""
    ways = {
        "train.py": [sys.executable, str(common.ROOT / "train.py")],
        "deepy.py train.py": [sys.executable, str(common.ROOT / "deepy.py"), "train.py"],
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, command in ways.items():
            run = folder / f"{number}-{name.replace(' ', '-')}"
            file = folder / f"{run.name}.yml"
            changes = {"save": str(run), "log_interval": 1}
            file.write_text(dump(config.model_copy(update=changes)), encoding="utf-8")
            times = first_row([*command, str(file)], run / "log.jsonl")
            if number:
                found[name].append(times)
    return found


def profile(folder: Path, config: Config) -> list[dict[str, Any]]:
    """The dearest packages of a start of `train.py`, as `dearest` gives them."""
    file = folder / "profile.yml"
    file.write_text(
        dump(config.model_copy(update={"save": str(folder / "profile")})), encoding="utf-8"
    )
    command = [sys.executable, "-X", "importtime", str(common.ROOT / "train.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return dearest(done.stderr)


def dearest(report: str, count: int = DEAREST) -> list[dict[str, Any]]:
    """From `-X importtime`: self times summed by top-level package, and the largest cumulative time."""
    packages: dict[str, dict[str, float]] = {}
    for own, whole, module in re.findall(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)", report):
        top = packages.setdefault(module.partition(".")[0], {"self": 0.0, "with_its_imports": 0.0})
        top["self"] += int(own) / 1e6
        top["with_its_imports"] = max(top["with_its_imports"], int(whole) / 1e6)
    ranked = sorted(packages.items(), key=lambda item: -item[1]["self"])
    return [{"package": name, **times} for name, times in ranked[:count]]


def helps(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of `--help`, which computes nothing."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WITHOUT_MODEL}
    for _ in range(rounds):
        for name in WITHOUT_MODEL:
            begun, used = time.perf_counter(), _children()
            command = [sys.executable, str(common.ROOT / name), "--help"]
            subprocess.run(command, check=True, capture_output=True)
            found[name].append((time.perf_counter() - begun, _children() - used))
    return found


def main() -> int:
    arguments = make_parser().parse_args()
    rounds = max(2, arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = make_config(Path(folder), arguments.model, "kerple_log", 2)
            found = starts(Path(folder), config, rounds)
            packages = profile(Path(folder), config)
            found |= {f"{name} --help": times for name, times in helps(rounds).items()}
        except (ValueError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    rows = [
        {
            "benchmark": "startup",
            "command": name,
            "starts": len(times),
            "seconds": statistics.median(seconds for seconds, _ in times),
            "least": min(times)[0],
            "most": max(times)[0],
            "cpu_seconds": statistics.median(used for _, used in times),
            "load": os.getloadavg()[0],
        }
        for name, times in found.items()
    ]
    common.append(arguments.output, rows)
    columns = ["command", "starts", "seconds", "least", "most", "cpu_seconds"]
    title = f"seconds from a command to its first logged step (or its end), target <= {TARGET}"
    print(common.table(title, columns, [[row[column] for column in columns] for row in rows]))
    columns = ["package", "self", "with_its_imports"]
    title = "seconds of importing in train.py, by package"
    print(common.table(title, columns, [[row[column] for column in columns] for row in packages]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
