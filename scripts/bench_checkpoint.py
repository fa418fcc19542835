"""What checkpoints cost: the share of a training's time that goes into saving, at the model's own interval.

A checkpoint is written, synchronised to the disk, hashed and renamed, as in a run; steps and saves take
turns. Both the processor's time and the clock's are compared, and the larger share is the result: the
first does not see the disk, the second sees the neighbours on a busy machine.

Example: python scripts/bench_checkpoint.py --rounds 5 --output results/bench/checkpoint.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_common as common  # first: it decides the number of threads
import torch
from bench_training import MODELS, Engine, make_config

from megatron_patches.config import Config
from megatron_patches.standalone import runtime
from megatron_patches.standalone.data import micro_batches
from megatron_patches.training.leaving import leave

TARGET = 0.02


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--method", default="kerple_log", help="position method (kerple_log)")
    parser.add_argument("--rounds", type=int, default=5, help="saves, each after 4 steps (5)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    return parser


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the processor and of the clock."""
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - clock


def measure(config: Config, world: runtime.World, rounds: int, steps: int = 4) -> dict[str, Any]:
    """Median seconds of a step and of a save, and the share of saving at `checkpoint_factor`."""
    engine = Engine(config, world)
    torch.set_num_threads(1)  # joining the process group gave us all cores
    trainer = engine.trainer
    batches = micro_batches(trainer.samples, trainer.batch.micro, 0, 1, 0)
    engine.one_step(batches)  # the optimizer's state is made here
    trainer.save()
    stepping, saving = [], []
    for _ in range(rounds):
        stepping += [timed(lambda: engine.one_step(batches)) for _ in range(steps)]
        saving.append(timed(trainer.save))
    step, save = (
        [statistics.median(row) for row in zip(*x, strict=True)] for x in (stepping, saving)
    )
    assert config.checkpoint_factor is not None
    interval = int(config.checkpoint_factor)
    folder = trainer.folder / (trainer.folder / "latest").read_text(encoding="utf-8")
    shares = [save[i] / (interval * step[i] + save[i]) for i in range(2)]
    return {
        "benchmark": "checkpoint",
        "method": config.pos_emb,
        "parameters": trainer.parameters,
        "interval": interval,
        "megabytes": sum(file.stat().st_size for file in folder.iterdir()) / 1e6,
        "step_seconds": step[1],
        "save_seconds": save[1],
        "step_cpu_seconds": step[0],
        "save_cpu_seconds": save[0],
        "share_cpu": shares[0],
        "share_clock": shares[1],
        "share": max(shares),
    }


def main() -> int:
    arguments = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = make_config(Path(folder), arguments.model, arguments.method, 100_000)
            row = {"model": arguments.model}
            row |= measure(config, runtime.start(config), max(2, arguments.rounds))
        except (ValueError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            runtime.finish()
    common.append(arguments.output, [row])
    columns = [
        "model",
        "parameters",
        "interval",
        "megabytes",
        "step_seconds",
        "save_seconds",
        "share",
    ]
    title = f"saving as a share of training, target <= {TARGET}"
    print(common.table(title, columns, [[row[column] for column in columns]]))
    return 0


if __name__ == "__main__":
    leave(main())
