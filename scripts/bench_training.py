"""A training step of the engine against a bare torch loop: same model, data, optimizer, clipping.

The two take turns step by step on the same batches, from the same weights, so their losses must agree;
no ratio is printed where they do not. Only the CPU time of one thread is counted.

Example: python scripts/bench_training.py --steps 20 --output results/bench/training.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bench_common as common  # first: it decides the number of threads
import numpy as np
import torch

from data_prep.indexed import write_indexed
from megatron_patches.config import Config, compose
from megatron_patches.standalone import runtime
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.data import micro_batches
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.optimizer import parameter_groups
from megatron_patches.standalone.schedule import learning_rate
from megatron_patches.standalone.train import Trainer
from megatron_patches.training.leaving import leave

VOCABULARY = 1024
MODELS = {
    "tiny": ["seq_length=512"],
    "width256": ["num_layers=4", "hidden_size=256", "num_attention_heads=8", "seq_length=512"],
    "smallest": ["num_layers=1", "hidden_size=32", "seq_length=32"],  # for tests only
}
TARGET = 1.10


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["tiny", "width256"])
    parser.add_argument("--method", default="kerple_log", help="position method (kerple_log)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each (20)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    return parser


def make_config(folder: Path, model: str, method: str, steps: int) -> Config:
    """The tiny configuration on random tokens in `folder`."""
    random = np.random.RandomState(0)
    documents = [random.randint(0, VOCABULARY, 4096) for _ in range(64)]
    prefix = folder / f"{model}-text"
    write_indexed(prefix, documents, vocab_size=VOCABULARY, sidecar={})
    files = [common.ROOT / "configs" / name for name in ("base/tiny.yml", "cluster/cpu.yml")]
    overrides = [
        *MODELS[model],
        f"pos_emb={method}",
        f"train_iters={steps}",
        f"padded_vocab_size={VOCABULARY}",
        *(f"{part}_data_paths=[{prefix}]" for part in ("train", "valid", "test")),
        "eval_iters=0",
        f"save={folder / model}",
        "max_position_embeddings=512",
    ]
    return compose(files, overrides)


class Bare:
    """What anybody would write with torch alone."""

    def __init__(self, config: Config) -> None:
        self.config, self.step = config, 0
        self.model = GPT(shape_of(config)).train()
        params = config.optimizer.params
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, config),
            lr=0.0,
            betas=(params.betas[0], params.betas[1]),
            eps=params.eps,
            fused=True,
        )

    def one_step(self, batches: Any) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        text = torch.from_numpy(next(batches)[1])
        loss = self.model(text[:, :-1], text[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for method in dict.fromkeys(self.model.methods):
            method.project_()
        self.step += 1
        return float(loss.detach())


class Engine:
    """The suite's trainer, one step at a time, without logging and saving."""

    def __init__(self, config: Config, world: runtime.World) -> None:
        self.config, self.trainer = config, Trainer(config, world)
        self.trainer.engine.train()

    def one_step(self, batches: Any) -> float:
        trainer = self.trainer
        for group in trainer.engine.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, trainer.step)
        loss = trainer._one_step(batches, measure=False)
        trainer.step += 1
        return float(loss.item())


def measure(config: Config, world: runtime.World, model: str, warm: int = 3) -> dict[str, Any]:
    """Median CPU seconds of a step of both, in turn.

    Raises RuntimeError when their losses differ.
    """
    engine, bare = Engine(config, world), Bare(config)
    torch.set_num_threads(1)  # joining the process group gave us all cores
    micro = engine.trainer.batch.micro

    def steps(one_step: Callable[[Any], float]) -> Callable[[], float]:
        batches = micro_batches(engine.trainer.samples, micro, 0, 1, 0)
        return lambda: one_step(batches)

    turns = {"engine": steps(engine.one_step), "bare": steps(bare.one_step)}
    times: dict[str, list[float]] = {name: [] for name in turns}
    losses: dict[str, float] = {}

    def turn(name: str) -> None:
        losses[name] = turns[name]()

    for number in range(config.train_iters):
        for name in list(turns) if number % 2 else reversed(list(turns)):
            seconds = common.cpu_seconds(partial(turn, name))
            if number >= warm:
                times[name].append(seconds)
        if abs(losses["engine"] - losses["bare"]) > 1e-3:
            raise RuntimeError(f"{model}: at step {number + 1} the losses differ: {losses}")
    return {
        "benchmark": "training",
        "model": model,
        "method": config.pos_emb,
        "parameters": bare.model.parameter_count(),
        "steps": len(times["bare"]),
        "engine_seconds": statistics.median(times["engine"]),
        "bare_seconds": statistics.median(times["bare"]),
        "ratio": statistics.median(
            [ours / theirs for ours, theirs in zip(times["engine"], times["bare"], strict=True)]
        ),
        "loss_difference": abs(losses["engine"] - losses["bare"]),
    }


def main() -> int:
    arguments = make_parser().parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for model in arguments.models:
                config = make_config(Path(folder), model, arguments.method, arguments.steps + 3)
                rows.append(measure(config, runtime.start(config), model))
        except (ValueError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            runtime.finish()
    common.append(arguments.output, rows)
    columns = ["model", "method", "parameters", "steps", "engine_seconds", "bare_seconds", "ratio"]
    lines = [[row[column] for column in columns] for row in rows]
    print(common.table(f"training step, target ratio <= {TARGET}", columns, lines))
    return 0


if __name__ == "__main__":
    leave(main())
