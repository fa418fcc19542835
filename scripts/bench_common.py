"""What the benchmarks share: one thread, CPU time, interleaved rounds, peak memory, JSON lines.

Import it before torch. Wall-clock time on a busy machine measures the neighbours, and several OpenMP
threads measure the scheduler; one thread and the CPU time of the process measure the work.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Read when torch is loaded, hence here, above everything that could load it.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

torch.set_num_threads(1)

SHORTEST = 0.05  # seconds of one reading; faster work is repeated until it takes this long


def machine() -> dict[str, Any]:
    """The class of the machine, nothing that identifies it."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {"cpu": model, "cores": os.cpu_count(), "torch": torch.__version__, "threads": 1}


def cpu_seconds(work: Callable[[], object], repeats: int = 1) -> float:
    begun = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - begun) / repeats


def interleaved(
    variants: dict[str, Callable[[], object]], *, rounds: int, budget: float = 60.0
) -> dict[str, list[float]]:
    """CPU seconds of every variant in every round, variants shuffled inside each round.

    At least two rounds; further ones only while `budget` seconds are not spent.
    """
    repeats = {
        name: max(1, round(SHORTEST / max(cpu_seconds(work), 1e-6)))
        for name, work in variants.items()
    }
    found: dict[str, list[float]] = {name: [] for name in variants}
    shuffle, begun = random.Random(0), time.process_time()
    for done in range(max(2, rounds)):
        if done >= 2 and time.process_time() - begun > budget:
            break
        for name in shuffle.sample(list(variants), len(variants)):
            found[name].append(cpu_seconds(variants[name], repeats[name]))
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of one over median of the other."""
    return statistics.median(ours) / statistics.median(theirs)


def peak_megabytes(work: Callable[[], object]) -> float:
    """Highest resident memory during `work` above that before it, MB. Call once in a process."""
    before = _resident_kilobytes("VmRSS")
    # Where it fails the peak includes what came before the call: never too small a number.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    work()
    peak = _resident_kilobytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(0.0, (peak - before) / 1024)


def _resident_kilobytes(key: str) -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
    return 0


def available_bytes() -> int:
    """Memory that can still be taken, 4 GB where the system does not say."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30


def in_subprocess(script: str, arguments: Sequence[object]) -> dict[str, Any]:
    """Run `script` with these arguments in a fresh process; the JSON of its last line."""
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(script).name} {' '.join(command[2:])} failed: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown; floats with three digits, None as a dash."""

    def cell(value: object) -> str:
        if value is None:
            return "-"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [title, "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def append(output: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**row, **machine()}) + "\n")
