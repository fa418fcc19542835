"""A training step of GPT-NeoX with its own attention and with layers of type `attend`.

Two processes hold the same model with the same weights; they take turns step by step, one thread each,
and the CPU time of their own process is counted. Peak memory is that of one more step, above what model
and optimizer take. Nothing is printed unless their losses agree.

Example: NEOX_HOME=~/gpt-neox python scripts/bench_neox.py --lengths 512 2048 4096
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_common as common  # first: it sets the threads

from megatron_patches.config import ConfigError
from megatron_patches.neox import find
from megatron_patches.neox.fixes import FIXES

DATA = common.ROOT / "tests" / "goldens" / "neox_data"
TOLERANCE = 1e-4  # relative, of the loss of each step
# What NeoX has itself is measured without our corrections of it.
NATIVE = {"alibi": [name for name in FIXES if name != "pkg_resources"]}
KINDS = {"NeoX's attention": "global", "attend": "attend"}


def make_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--methods", nargs="+", default=["kerple_log", "alibi"])
    made.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--width", type=int, default=768, help="64 a head (768)")
    made.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    made.add_argument("--show", type=Path, metavar="FILE", help="only print the table of its lines")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


# ---- in the process that holds a model -----------------------------------------------------------


def child(settings: dict[str, Any]) -> None:
    """Build the model, then answer each line of standard input with one line of JSON."""
    os.environ.update(
        DS_ACCELERATOR="cpu",
        LOCAL_SIZE="1",
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what NeoX prints is not an answer
    import torch

    from megatron_patches.neox import install

    install(fixes_off=settings.pop("fixes_off"))
    from megatron import training
    from megatron.neox_arguments import NeoXArgs
    from megatron.utils import Timers

    args = NeoXArgs.from_dict(settings)
    args.configure_distributed_args()
    args.build_tokenizer()
    training.initialize_megatron(neox_args=args)
    model, optimizer, scheduler, _ = training.setup_model_and_optimizer(args)
    generator = torch.Generator().manual_seed(0)
    length = settings["seq_length"]
    text = torch.randint(0, args.padded_vocab_size, (1, length + 1), generator=generator)

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {"text": text}

    stream, timers, losses = batches(), Timers(False, None, None), []
    model.train()

    def step() -> None:
        found, _ = training.train_step(
            neox_args=args,
            timers=timers,
            data_iterator=stream,
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
        )
        losses.append(float(found["lm_loss"]))

    def peak() -> float:
        # What earlier steps freed stays with the process and would count as taken before.
        ctypes.CDLL(None).malloc_trim(0)
        return common.peak_megabytes(step)

    work = {
        "step\n": lambda: {"seconds": common.cpu_seconds(step), "loss": losses[-1]},
        "peak\n": lambda: {"megabytes": peak(), "loss": losses[-1]},
    }
    for request in sys.stdin:
        answers.write(json.dumps(work[request]()) + "\n")
        answers.flush()


# ---- in the process that compares them -----------------------------------------------------------


class Model:
    """A child process with one model."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        self.log = log
        self._errors = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, request: str) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            tail = self.log.read_text(encoding="utf-8")[-1500:]
            raise RuntimeError(f"a model stopped at {request!r}: {tail}")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()


def measure(options: argparse.Namespace, method: str, length: int, folder: Path) -> dict[str, Any]:
    """One row; RuntimeError where the losses differ."""
    settings = {
        "num_layers": options.layers,
        "hidden_size": options.width,
        "num_attention_heads": options.width // 64,
        "seq_length": length,
        "max_position_embeddings": length,
        "pos_emb": method,
        "no_weight_tying": True,
        "use_cpu_initialization": True,
        "train_micro_batch_size_per_gpu": 1,
        "train_iters": 1000,
        "lr_decay_iters": 1000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8}},
        "precision": "fp32",
        "distributed_backend": "gloo",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tokenizer_type": "HFTokenizer",
        "vocab_file": str(folder / "tok_c.json"),
        "data_path": str(folder / "c_noeod_text_document"),
    }
    models = {
        name: Model(
            {**settings, "attention_config": [[[kind], "all"]], "fixes_off": _off(method, kind)},
            folder / f"{method}-{length}-{kind}.log",
        )
        for name, kind in KINDS.items()
    }
    try:
        return {"method": method, "length": length, **_compare(models, options.rounds)}
    finally:
        for model in models.values():
            model.close()


def _off(method: str, kind: str) -> list[str]:
    return NATIVE.get(method, []) if kind == "global" else []


def _compare(models: dict[str, Model], rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        found = {name: model.ask("step") for name, model in models.items()}
        _agree({name: answer["loss"] for name, answer in found.items()})
        for name, answer in found.items():
            if turn:  # the first step allocates
                seconds[name].append(answer["seconds"])
    peaks = {name: model.ask("peak")["megabytes"] for name, model in models.items()}
    theirs, ours = KINDS
    return {
        "neox_seconds": statistics.median(seconds[theirs]),
        "attend_seconds": statistics.median(seconds[ours]),
        "times_faster": 1 / common.ratio(seconds[ours], seconds[theirs]),
        "neox_mb": peaks[theirs],
        "attend_mb": peaks[ours],
        "times_less_memory": peaks[theirs] / peaks[ours],
    }


def _agree(losses: dict[str, float]) -> None:
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= TOLERANCE * high:
        raise RuntimeError(f"the losses differ, so there is nothing to compare: {losses}")


CELLS = (
    *("method", "length", "neox_seconds", "attend_seconds", "times_faster"),
    *("neox_mb", "attend_mb", "times_less_memory"),
)


def show(rows: list[dict[str, Any]]) -> str:
    header = ["method", "length", "NeoX s", "attend s", "times faster"]
    header += ["NeoX MB", "attend MB", "times less memory"]
    first = rows[0]
    title = (
        f"GPT-NeoX, training step, {first['layers']} layers of {first['width']}, batch 1, fp32, "
        "one thread, CPU time; peak memory of a step above model and optimizer"
    )
    return common.table(title, header, [[row[cell] for cell in CELLS] for row in rows])


def main() -> int:
    options = make_parser().parse_args()
    if options.child:
        child(json.loads(options.child))
        return 0
    if options.show is not None:
        lines = [json.loads(line) for line in options.show.read_text(encoding="utf-8").splitlines()]
        print(show(list({(row["method"], row["length"]): row for row in lines}.values())))
        return 0
    try:
        commit = find().commit
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(DATA, folder, dirs_exist_ok=True)
        for method in options.methods:
            for length in options.lengths:
                shape = {"layers": options.layers, "width": options.width, "neox_commit": commit}
                rows.append({**measure(options, method, length, folder), **shape})
                common.append(options.output, [{"benchmark": "neox", **rows[-1]}])
    print(show(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
