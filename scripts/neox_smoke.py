"""Train a few steps of every method in the standalone engine and in your GPT-NeoX, and compare.

All runs of a method start from the same weights and read the same samples: the standalone engine, NeoX
with one process, with layers of type `attend`, with 2 tensor-parallel shards, 2 pipeline stages and 2
data-parallel processes. Everything runs on the CPU. The exit code is 1 where a run fails, or differs
by more than 1e-5 (1e-4 for a method whose gradients jump with rounding, which is printed with its reason).

Example: NEOX_HOME=~/gpt-neox python scripts/neox_smoke.py --methods kerple_log alibi
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_patches.config import ConfigError, dump, from_mapping  # noqa: E402
from megatron_patches.neox import find  # noqa: E402
from megatron_patches.positions import method_class, names  # noqa: E402
from megatron_patches.standalone.arguments import USAGE, guarded, parser, whole  # noqa: E402
from megatron_patches.standalone.provenance import git_sha  # noqa: E402

DATA = ROOT / "tests" / "goldens" / "neox_data"
# Begins the answer of the suite where GPT-NeoX could not carry a method; such a cell says `refused`.
LOSES = "this configuration would lose its position method"
TOLERANCE = 1e-5  # relative, of each step's loss and gradient norm; all arithmetic is float32
LOOSER = 1e-4  # for methods with `rounding_jumps`
BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "no_weight_tying": True,
    "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
    "weight_decay": 0.1,
    "gradient_clipping": 1.0,
    "lr_decay_style": "cosine",
    "warmup": 0.1,
    "train_batch_size": 4,
    "split": "90,5,5",
    "data_impl": "mmap",
    "num_workers": 0,
    "tokenizer_type": "HFTokenizer",
    "distributed_backend": "gloo",
    "precision": "fp32",
    "eval_interval": 10,
    "eval_iters": 2,
    "log_interval": 1,
    "steps_per_print": 100,
    "finetune": True,
}


@dataclass(frozen=True)
class Way:
    """One way of training: which engine, on how many processes, from which form of the weights."""

    name: str
    keys: dict[str, Any]
    engine: str = "neox"
    processes: int = 1
    start: str = "single"


WAYS = (
    Way("standalone", {}, engine="standalone"),
    Way("1 process", {}),
    Way("attend", {"attention_config": [[["attend"], "all"]]}),
    Way("TP 2", {"model_parallel_size": 2}, processes=2, start="shards"),
    Way("PP 2", {"pipe_parallel_size": 2}, processes=2, start="layers"),
    Way("DP 2", {}, processes=2),
)


@dataclass
class Outcome:
    """What one run gave; `difference` is the largest one, relative to standalone, over the losses and
    gradient norms of all steps and the validation losses."""

    method: str
    way: str
    loss: float | None
    validation: float | None
    difference: float | None
    seconds: float
    error: str = ""
    refused: bool = False  # by name, before anything was trained

    @property
    def right(self) -> bool:
        if self.refused:
            return True
        allowed = LOOSER if method_class(self.method).rounding_jumps else TOLERANCE
        return not self.error and self.difference is not None and self.difference <= allowed


def make_parser() -> argparse.ArgumentParser:
    made = parser(
        (__doc__ or "").split("\n\nExample")[0],
        "NEOX_HOME=~/gpt-neox python scripts/neox_smoke.py --methods kerple_log alibi",
    )
    made.add_argument("--methods", nargs="+", choices=names(), default=names(), metavar="METHOD")
    made.add_argument("--steps", type=whole(1), default=20, help="of each run (20)")
    made.add_argument("--output", type=Path, metavar="FILE", help="append a JSON line for each run")
    made.add_argument("--show", type=Path, metavar="FILE", help="only print the table of its lines")
    made.add_argument("--folder", type=Path, help="keep the runs here; default: a temporary folder")
    return made


def show(path: Path) -> str:
    """The table of the latest run of each cell, and where it comes from."""
    rows = [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]
    latest = {(row["method"], row["way"]): row for row in rows}
    about = {
        name: {row.pop(name) for row in latest.values()} for name in ("neox_commit", "git_sha")
    }
    commits = ", ".join(sorted(commit[:8] for commit in about["neox_commit"]))
    outcomes = [Outcome(**row) for row in latest.values()]
    return (
        f"{table(outcomes)}\n\nGPT-NeoX {commits}, this suite {', '.join(sorted(about['git_sha']))}"
    )


def run(options: argparse.Namespace) -> int:
    if options.show is not None:
        print(show(options.show))
        return 0
    checkout = find()
    kept = options.folder
    folder = Path(tempfile.mkdtemp()) if kept is None else kept.resolve()
    if kept is not None and kept.exists() and any(kept.iterdir()):
        raise ConfigError(f"--folder {kept}: is not empty")
    shutil.copytree(DATA, folder / "data", dirs_exist_ok=True)  # NeoX writes index maps beside it
    outcomes: list[Outcome] = []
    try:
        for method in options.methods:
            outcomes += compare(method, folder, options.steps)
            print(line(outcomes[-len(WAYS) :]), flush=True)
            if options.output is not None:
                append(options.output, outcomes[-len(WAYS) :], checkout.commit)
    finally:
        if kept is None:
            shutil.rmtree(folder)
    print("\n" + table(outcomes))
    print("\n" + allowances(options.methods))
    for outcome in outcomes:
        if outcome.refused or not outcome.right:
            print(f"{outcome.method}, {outcome.way}: {outcome.error or 'differs'}", file=sys.stderr)
    return 0 if all(outcome.right for outcome in outcomes) else 1


def compare(method: str, folder: Path, steps: int) -> list[Outcome]:
    """All ways of training one method."""
    base = {
        **BASE,
        "pos_emb": method,
        "train_iters": steps,
        # Below one whole step of warm-up NeoX's first step runs above the peak rate.
        "warmup": max(BASE["warmup"], 1 / steps),
        "data_path": str(folder / "data" / "c_noeod_text_document"),
        "vocab_file": str(folder / "data" / "tok_c.json"),
        "extra_save_iters": [steps],
    }
    starts = write_starts(method, base, folder)
    reference: list[float] = []
    outcomes = []
    for way in WAYS:
        keys = {**base, **way.keys, "load": str(starts[way.start]), "num_gpus": way.processes}
        outcome, losses = train(way, keys, folder / method)
        reference = reference or losses
        outcome.difference = difference(losses, reference) if losses else None
        outcomes.append(outcome)
    return outcomes


def write_starts(method: str, base: dict[str, Any], folder: Path) -> dict[str, Path]:
    """The same first weights in the forms that the ways of training load."""
    from megatron_patches.standalone.build import shape_of
    from megatron_patches.standalone.export import Form, export
    from megatron_patches.standalone.model import GPT

    config = from_mapping(base)
    model = GPT(shape_of(config))
    forms = {
        "single": Form(),
        "shards": Form(tensor_parallel=2),
        "layers": Form(layout="layers"),
    }
    if model.position_method.mixes_heads:  # refused by name before any weights are read
        forms["shards"] = Form()
    for name, form in forms.items():
        export(model, folder / method / "start" / name, step=0, config=config, form=form)
    return {name: folder / method / "start" / name for name in forms}


def train(way: Way, keys: dict[str, Any], folder: Path) -> tuple[Outcome, list[float]]:
    save = folder / way.name.replace(" ", "-")
    config = from_mapping({**keys, "save": str(save), "run_name": save.name})
    file = folder / f"{save.name}.yml"
    file.write_text(dump(config), encoding="utf-8")
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(ROOT / "deepy.py"), "--engine", way.engine, "train.py", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    outcome = Outcome(
        str(config.pos_emb), way.name, None, None, None, time.perf_counter() - started
    )
    save.with_suffix(".log").write_text(done.stdout, encoding="utf-8")
    outcome.refused = done.returncode == USAGE and LOSES in done.stdout
    if done.returncode:
        outcome.error = f"failed: {last_error(done.stdout)}"
        return outcome, []
    rows = [json.loads(row) for row in (save / "log.jsonl").read_text().splitlines()]
    losses = [row["lm_loss"] for row in rows if "lm_loss" in row]
    norms = [row["gradient_norm"] for row in rows if "lm_loss" in row]
    # NeoX validates once more at the end; the other engine at each interval alone.
    found = {r["iteration"]: r["validation_loss"] for r in rows if "validation_loss" in r}
    validations = [loss for at, loss in found.items() if at % BASE["eval_interval"] == 0]
    outcome.loss, outcome.validation = losses[-1], validations[0] if validations else None
    return outcome, [*losses, *norms, *validations]


def last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "rror" in line and "launch.py" not in line]
    return lines[-1][-200:] if lines else "no message"


def difference(losses: list[float], reference: list[float]) -> float:
    """Infinite where the numbers of steps differ."""
    if len(losses) != len(reference):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def append(path: Path, outcomes: list[Outcome], commit: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for outcome in outcomes:
            about = {"neox_commit": commit, "git_sha": git_sha(), **asdict(outcome)}
            file.write(json.dumps(about) + "\n")


def allowances(methods: Sequence[str]) -> str:
    """How far the ways may lie apart; of the methods that are allowed more, why."""
    reasons = {name: method_class(name).rounding_jumps for name in methods}
    told = [f"{name}: {LOOSER:.0e}, because {why}" for name, why in reasons.items() if why]
    return "\n".join([f"allowed: {TOLERANCE:.0e}", *told])


def line(outcomes: list[Outcome]) -> str:
    seconds = sum(outcome.seconds for outcome in outcomes)
    marks = " ".join(f"{o.way}: {cell(o)};" for o in outcomes)
    return f"{outcomes[0].method} ({seconds:.0f} s)  {marks}"


def cell(outcome: Outcome) -> str:
    if outcome.error:
        return "refused" if outcome.refused else "failed"
    if outcome.difference is None or outcome.loss is None:
        return "nothing to compare with"
    return f"{outcome.loss:.6f}" if outcome.way == WAYS[0].name else f"{outcome.difference:.1e}"


def table(outcomes: list[Outcome]) -> str:
    """Markdown: the standalone engine's last loss, and the largest relative difference of the others."""
    head = ["method", "last loss", *(way.name for way in WAYS[1:])]
    rows = [head, ["---"] * len(head)]
    for method in dict.fromkeys(outcome.method for outcome in outcomes):
        rows.append([method, *(cell(o) for o in outcomes if o.method == method)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    return guarded(lambda: run(options), options.debug)


if __name__ == "__main__":
    sys.exit(main())
