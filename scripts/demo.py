"""The whole job in miniature: prepare text, train several methods, sweep lengths, show the result.

Interrupted and started again it goes on where it was: every part skips what is complete.

Example: python scripts/demo.py --methods kerple_log alibi rotary --steps 300
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

from data_prep.indexed import IndexedDataset  # noqa: E402
from megatron_patches import positions  # noqa: E402
from megatron_patches.analysis import figures, figures_kernels, rows, style, tables  # noqa: E402
from megatron_patches.analysis.cuts import fixed_cut, text_fingerprint  # noqa: E402
from megatron_patches.analysis.published import (  # noqa: E402
    PublishedRow,
    published_ratio,
    read_published,
)
from megatron_patches.analysis.render import to_markdown  # noqa: E402
from megatron_patches.standalone.arguments import guarded, whole  # noqa: E402

CORPUS, TREND = "local_code", "github"  # ours, and the published data set of the same kind
METHODS = ("kerple_log", "alibi", "rotary", "sinusoidal")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FLAT = 1.5  # a published method counts as flat when its perplexity at 16384 is below this x its 512


@dataclass(frozen=True)
class Demo:
    """One demonstration: what to train, how long, where the results go."""

    methods: tuple[str, ...]
    steps: int
    seed: int
    lengths: tuple[int, ...]
    tokens: int
    output: Path
    jobs: int

    def run_name(self, method: str) -> str:
        return f"demo-{method}-{self.steps}-{self.seed}"

    def folder(self, method: str) -> Path:
        return ROOT / "checkpoints" / self.run_name(method)

    def train_command(self, method: str) -> list[str]:
        files = [f"configs/{p}.yml" for p in ("base/tiny", f"method/{method}", f"dataset/{CORPUS}")]
        changes = {
            "run_name": self.run_name(method),
            "seed": self.seed,
            "train_iters": self.steps,
            "distributed_backend": "gloo",
            "checkpoint_factor": 100,
        }
        settings = [x for key, value in changes.items() for x in ("--set", f"{key}={value}")]
        return [sys.executable, "deepy.py", *settings, "train.py", *files]

    def evaluate_command(self, method: str) -> list[str]:
        folder = self.folder(method)
        lengths = [str(length) for length in self.lengths]
        (folder / "kernels.jsonl").unlink(missing_ok=True)
        files = ["--output", str(folder / "rows.jsonl"), "--kernels", str(folder / "kernels.jsonl")]
        command = [sys.executable, "eval.py", "--checkpoint", str(folder), "--resume", *files]
        return [*command, "--max-tokens", str(self.tokens), "--lengths", *lengths]


def run(command: list[str], log: Path, threads: int) -> None:
    """Run one part; RuntimeError with the end of its output when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    with open(log, "a", encoding="utf-8") as stream:
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=stream, stderr=stream).returncode
    if code:
        tail = "\n  ".join(log.read_text(encoding="utf-8").splitlines()[-8:])
        raise RuntimeError(f"{' '.join(command[1:4])} failed with exit code {code}:\n  {tail}")


def train_and_score(demo: Demo, method: str, threads: int) -> None:
    log = demo.folder(method) / "output.txt"
    run(demo.train_command(method), log, threads)
    run(demo.evaluate_command(method), log, threads)


class Progress(threading.Thread):
    """Watches the files that the runs write; bars on a terminal, a line now and then elsewhere."""

    def __init__(self, demo: Demo) -> None:
        super().__init__(daemon=True)
        self.demo, self.done = demo, threading.Event()

    def state(self, method: str) -> tuple[int, str]:
        """Steps done (each length counts as much as a tenth of the training), and what they are."""
        folder, steps = self.demo.folder(method), self.demo.steps
        last = _last(folder / "log.jsonl", "lm_loss")
        scored = _count(folder / "rows.jsonl")
        if scored:
            return (
                steps + scored * steps // 10,
                f"scored {scored} of {len(self.demo.lengths)} lengths",
            )
        if last is None:
            return 0, "waiting"
        left = (steps - last["iteration"]) / max(last["steps_per_second"], 1e-9)
        return int(last["iteration"]), f"loss {last['lm_loss']:.3f}, {left:.0f} s of training left"

    def run(self) -> None:
        total = self.demo.steps + len(self.demo.lengths) * (self.demo.steps // 10)
        if not sys.stderr.isatty():
            while not self.done.wait(20):
                states = (f"{m} {self.state(m)[0] * 100 // total}%" for m in self.demo.methods)
                print("  ".join(states), file=sys.stderr, flush=True)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (TextColumn("{task.description:<14}"), BarColumn(), TaskProgressColumn())
        with Progress(
            *columns, TextColumn("{task.fields[s]}"), console=Console(stderr=True)
        ) as bars:
            tasks = {m: bars.add_task(m, total=total, s="") for m in self.demo.methods}
            while not self.done.wait(0.5):
                for method, task in tasks.items():
                    at, text = self.state(method)
                    bars.update(task, completed=at, s=text)


def _last(path: Path, key: str) -> dict[str, float] | None:
    if not path.exists():
        return None
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if f'"{key}"' in line]
    try:
        return dict(json.loads(lines[-1])) if lines else None
    except ValueError:
        return None  # the line is being written


def _count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def work(demo: Demo) -> int:
    begun = time.perf_counter()
    print(f"1/3 preparing data/{CORPUS}: Python's own standard library", flush=True)
    prepare = [sys.executable, "-m", "data_prep", CORPUS, "--output", f"data/{CORPUS}"]
    if code := subprocess.run(prepare, cwd=ROOT).returncode:
        raise RuntimeError(f"preparing the data failed with exit code {code}")
    jobs = min(demo.jobs, len(demo.methods))
    print(
        f"2/3 training {len(demo.methods)} methods for {demo.steps} steps at 512 tokens, {jobs} at a time"
    )
    threads = max(1, (os.cpu_count() or 1) // jobs)
    progress = Progress(demo)
    progress.start()
    with ThreadPoolExecutor(jobs) as pool:
        parts = [pool.submit(train_and_score, demo, m, threads) for m in demo.methods]
    progress.done.set()
    progress.join()
    for part in parts:
        part.result()
    print(f"3/3 results, after {time.perf_counter() - begun:.0f} s\n")
    return publish(demo)


def publish(demo: Demo) -> int:
    """Rows, tables and figures into `output`; 1 when the expected split between methods is not there."""
    found = [r for m in demo.methods for r in rows.read_rows(demo.folder(m) / "rows.jsonl")]
    found = chosen(demo, found, IndexedDataset(ROOT / "data" / CORPUS / "valid"))
    files = [demo.folder(m) / "kernels.jsonl" for m in demo.methods]
    kernels = rows.read_kernels([file for file in files if file.exists()])
    published = read_published(ROOT / "results" / "published.csv")
    trend = tables.published_rows(published, "Table 3", TREND)
    parts = [
        tables.extrapolation_table(found),
        tables.published_table(published, table="Table 3", dataset=TREND),
        tables.relative_table(found, trend),
    ]
    text = "\n".join(to_markdown(part) for part in parts)
    verdict, right = expected_split(demo, found, trend)
    demo.output.mkdir(parents=True, exist_ok=True)
    for name in ("rows.jsonl", "kernels.jsonl"):
        (demo.output / name).unlink(missing_ok=True)
    rows.append_rows(demo.output / "rows.jsonl", found)
    (demo.output / "table.md").write_text(text + "\n" + verdict + "\n", encoding="utf-8")
    drawn = style.save(figures.perplexity_figure(found), demo.output / "perplexity")
    if kernels:
        rows.append_kernels(demo.output / "kernels.jsonl", kernels)
        drawn += style.save(figures_kernels.kernel_figure(kernels), demo.output / "kernels")
    print(text, verdict, *(f"wrote {_shown(path)}" for path in drawn), sep="\n")
    return 0 if right else 1


def chosen(demo: Demo, found: list[rows.Row], valid: IndexedDataset) -> list[rows.Row]:
    """The rows of this demonstration: an earlier one with other lengths or tokens left its own.

    RuntimeError where a method has none at a length.
    """
    targets = min(demo.tokens, len(valid.tokens)) - 1
    longest = max((length for length in demo.lengths if length <= targets), default=0)
    data = text_fingerprint([valid.fingerprint], fixed_cut("", "nonoverlap", demo.tokens, longest))
    found = [r for r in found if r.data == data and r.eval_length in demo.lengths]
    there = {(r.method, r.eval_length) for r in found}
    wanted = [(method, length) for method in demo.methods for length in demo.lengths]
    if missing := [f"{m} at {n}" for m, n in wanted if (m, n) not in there]:
        raise RuntimeError(f"there are no rows of {', '.join(missing)}: start again with --fresh")
    return rows.latest_rows(found)


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def expected_split(
    demo: Demo, found: list[rows.Row], trend: list[PublishedRow]
) -> tuple[str, bool]:
    """Whether the methods that stay flat in the paper rise less here than those that do not."""
    longest, train = max(demo.lengths), min(demo.lengths)
    ours = {}
    for method in demo.methods:
        cells = {r.eval_length: r.perplexity for r in found if r.method == method}
        at_train, at_longest = cells.get(train), cells.get(longest)
        if at_train and at_longest:
            ours[method] = at_longest / at_train
    published = {m: published_ratio(trend, m, longest, train) for m in ours}
    paper = {m: ratio for m, ratio in published.items() if ratio is not None}
    flat = {m: ours[m] for m, ratio in paper.items() if ratio < FLAT}
    rising = {m: ours[m] for m, ratio in paper.items() if ratio >= FLAT}
    told = ", ".join(f"{m} {r:.2f}" for m, r in sorted(ours.items(), key=lambda pair: pair[1]))
    text = f"Perplexity at {longest} divided by that at {train}: {told}."
    if not flat or not rising:
        return text, True
    right = max(flat.values()) < min(rising.values())
    claim = (
        f"Every method that the paper shows flat ({', '.join(flat)}) stays below every one that "
        f"rises there ({', '.join(rising)})"
    )
    return f"{text}\n{claim}: {'yes' if right else 'NO'}.", right


def make_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--methods", nargs="+", default=METHODS, choices=positions.names())
    made.add_argument("--steps", type=whole(1), default=400, help="of 2048 tokens (400)")
    made.add_argument("--seed", type=whole(0, 2**32), default=1234)
    made.add_argument("--lengths", type=whole(1), nargs="+", default=LENGTHS)
    made.add_argument("--tokens", type=whole(2), default=131073, help="held-out tokens (131073)")
    made.add_argument(
        "--output",
        type=Path,
        default=ROOT / "results" / "my_demo",
        help="folder of rows, table and figures (results/my_demo, which git ignores)",
    )
    made.add_argument(
        "--jobs", type=whole(1), default=min(2, os.cpu_count() or 1), help="runs at a time"
    )
    made.add_argument("--fresh", action="store_true", help="forget earlier demo runs first")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return made


def main() -> int:
    options = make_parser().parse_args()
    demo = Demo(
        methods=tuple(options.methods),
        steps=options.steps,
        seed=options.seed,
        lengths=tuple(sorted(options.lengths)),
        tokens=options.tokens,
        output=options.output,
        jobs=options.jobs,
    )
    if options.fresh:
        for method in demo.methods:
            shutil.rmtree(demo.folder(method), ignore_errors=True)
    return guarded(lambda: work(demo), options.debug)


if __name__ == "__main__":
    sys.exit(main())
