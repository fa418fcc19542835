"""What TensorBoard and wandb cost a training step, beside log.jsonl alone.

They take turns in one process: open the trackers of a run, wait until they have a first row, take
some steps, each of which is logged (`log_interval: 1`, the dearest), close. The share of a step is the
difference of the medians over the median with log.jsonl alone, of the processor's time of the training
process and of the clock; the clock also sees the trackers' own processes on a machine without a free
core, and the neighbours. `log.jsonl again` shows how much of a share is noise.

Example: python scripts/bench_trackers.py --rounds 5 --output results/bench/trackers.jsonl
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_common as common  # first: it decides the number of threads
import torch
from bench_training import MODELS, Engine, make_config

from megatron_patches.config import Config, dump
from megatron_patches.standalone import runtime
from megatron_patches.standalone.data import micro_batches
from megatron_patches.standalone.watch import Watch
from megatron_patches.training import position_state
from megatron_patches.training.leaving import leave

TARGET = 0.01
TRACKERS: dict[str, dict[str, Any]] = {
    "log.jsonl": {},
    "log.jsonl again": {},  # what the comparison makes of no difference at all
    "tensorboard": {"tensorboard_dir": "tensorboard"},
    "wandb offline": {"use_wandb": True},
}
PATIENCE = 60.0  # seconds until a tracker must have its first row


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--method", default="kerple_log", help="position method (kerple_log)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (5)")
    parser.add_argument("--steps", type=int, default=20, help="steps a turn (20)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    return parser


class Bench:
    """One engine, and a run folder a tracker, so that each has its own log."""

    def __init__(self, folder: Path, model: str, method: str) -> None:
        self.config = make_config(folder, model, method, 1_000_000)
        self.engine = Engine(self.config, runtime.start(self.config))
        torch.set_num_threads(1)  # joining the process group gave us all cores
        trainer = self.engine.trainer
        self.batches = micro_batches(trainer.samples, trainer.batch.micro, 0, 1, 0)
        self.folder = folder
        self.engine.one_step(self.batches)  # the optimizer's state is made here

    def turn(self, name: str, steps: int) -> dict[str, list[float]]:
        """Seconds of each step: `cpu`, `clock`, and `log`, the part of the clock that logging takes."""
        watch = self._open(name)
        found: dict[str, list[float]] = {"cpu": [], "clock": [], "log": []}
        try:
            for _ in range(steps):
                cpu, clock = time.process_time(), time.perf_counter()
                loss = self.engine.one_step(self.batches)
                logging = time.perf_counter()
                watch.step(self._row(loss), show=False)
                end = time.perf_counter()
                found["cpu"].append(time.process_time() - cpu)
                found["clock"].append(end - clock)
                found["log"].append(end - logging)
        finally:
            watch.close()
        return found

    def _row(self, loss: float) -> dict[str, Any]:
        """As many numbers as a logged step has."""
        trainer = self.engine.trainer
        return {
            "iteration": trainer.step,
            "lm_loss": loss,
            "learning_rate": 1e-3,
            "gradient_norm": 1.0,
            "tokens": trainer.step,
            "tokens_per_second": 1.0,
            "steps_per_second": 1.0,
            "consumed_sha": trainer.consumed_sha,
            **position_state.statistics(trainer.model.own_methods()),
        }

    def _open(self, name: str) -> Watch:
        place = self.folder / name
        place.mkdir(exist_ok=True)
        config: Config = self.config.model_copy(update={**TRACKERS[name], "save": str(place)})
        (place / "config.yml").write_text(dump(config), encoding="utf-8")
        step = self.engine.trainer.step
        watch = Watch(config, place, step)
        watch.step(self._row(0.0), show=False)
        for tracker in watch._trackers:
            begun = time.monotonic()
            while tracker.done < step:
                if time.monotonic() - begun > PATIENCE:
                    raise RuntimeError(f"{name} has no row after {PATIENCE:.0f} s")
                time.sleep(0.05)
        return watch


def measure(bench: Bench, rounds: int, steps: int) -> list[dict[str, Any]]:
    found: dict[str, dict[str, list[float]]] = {
        name: {"cpu": [], "clock": [], "log": []} for name in TRACKERS
    }
    for number in range(rounds):
        order = list(TRACKERS)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            for key, values in bench.turn(name, steps).items():
                found[name][key] += values
    alone = {key: statistics.median(values) for key, values in found["log.jsonl"].items()}
    rows = []
    for name, times in found.items():
        own = {key: statistics.median(values) for key, values in times.items()}
        rows.append(
            {
                "benchmark": "trackers",
                "trackers": name,
                "parameters": bench.engine.trainer.parameters,
                "steps": len(times["cpu"]),
                "step_cpu_seconds": own["cpu"],
                "step_seconds": own["clock"],
                "log_seconds": own["log"],
                "share_cpu": own["cpu"] / alone["cpu"] - 1,
                "share_clock": own["clock"] / alone["clock"] - 1,
                "share_log": own["log"] / own["clock"],
                "load": os.getloadavg()[0],
            }
        )
    return rows


def main() -> int:
    arguments = make_parser().parse_args()
    os.environ["WANDB_MODE"] = "offline"
    with tempfile.TemporaryDirectory() as folder:
        here = Path.cwd()
        os.chdir(folder)
        try:
            bench = Bench(Path(folder), arguments.model, arguments.method)
            rows = measure(bench, max(2, arguments.rounds), arguments.steps)
        except (ValueError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            os.chdir(here)
            runtime.finish()
    rows = [{"model": arguments.model, **row} for row in rows]
    common.append(arguments.output, rows)
    columns = ["trackers", "steps", "step_cpu_seconds", "step_seconds", "log_seconds"]
    columns += ["share_cpu", "share_clock", "share_log"]
    title = f"logging every step, share of a step above log.jsonl alone, target <= {TARGET}"
    print(common.table(title, columns, [[row[column] for column in columns] for row in rows]))
    return 0


if __name__ == "__main__":
    leave(main())
