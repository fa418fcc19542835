"""What a plan costs: runs, tokens, memory, hours; read from configurations, data files and logs."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_patches.config import batch_arithmetic
from megatron_patches.studies.plan import Plan, Run, data_prefixes
from megatron_patches.studies.progress import PAPER_WINDOWS
from megatron_patches.studies.questions import ROWS_A_CELL, Eval
from megatron_patches.studies.schema import ROOT, shown
from megatron_patches.studies.steps import Step

# A training step is a forward and a backward pass, the latter about twice the work.
FORWARD_SHARE = 1 / 3
# Where the data are not prepared yet: GPT-2's entries as NeoX pads them.
ASSUMED_VOCABULARY = 50304


@dataclass(frozen=True)
class Cost:
    """Of what is left. `evaluation_tokens` is None where the text's size is not known yet."""

    training_tokens: int
    evaluation_tokens: int | None
    models: tuple[Model, ...]
    tokens_per_second: float | None  # of one training process

    @property
    def gigabytes(self) -> float | None:
        """The estimated memory of the largest run."""
        known = [model.gigabytes for model in self.models if model.gigabytes is not None]
        return max(known, default=None)

    def hours(self, parallel: int) -> float | None:
        if self.tokens_per_second is None:
            return None
        work = self.training_tokens + FORWARD_SHARE * (self.evaluation_tokens or 0)
        return work / self.tokens_per_second / parallel / 3600


@dataclass(frozen=True)
class Model:
    """One size of model and batch in the study, as `deepy.py --dry-run` describes it."""

    train_length: int
    summary: str
    gigabytes: float | None


def estimate(plan: Plan, tokens_per_second: float | None = None) -> Cost:
    """The cost of the unfinished runs; without `tokens_per_second`, the median of the finished ones."""
    runs = plan.unfinished
    training, scoring = 0, 0
    unknown = False
    for run in runs:
        for step in plan.steps(run):
            if step.trains:
                training += _training_tokens(run)
                continue
            tokens = _step_tokens(plan, run, step)
            unknown |= tokens is None
            scoring += tokens or 0
    return Cost(
        training,
        None if unknown else scoring,
        _models(runs),
        tokens_per_second or _measured(plan),
    )


def _training_tokens(run: Run) -> int:
    config = run.config
    return batch_arithmetic(config, 1).global_ * config.seq_length * config.train_iters


def _step_tokens(plan: Plan, run: Run, step: Step) -> int | None:
    """Tokens that pass through the model for one step, over all its cells."""
    asked = plan.study.eval
    if step.retrieval:
        return _retrieval_tokens(plan.study.eval)
    if step.protocol == "paper":
        return sum((asked.paper_windows or PAPER_WINDOWS) * length for length in asked.lengths)
    size = _split_tokens(run, step.split or "valid")
    if asked.max_tokens is not None:
        size = asked.max_tokens if size is None else min(size, asked.max_tokens)
    if size is None:
        return None
    longest = max((n for n in asked.lengths if n < size), default=0)
    if step.protocol == "last":
        windows = max(0, size - 1 - longest) // (asked.stride or longest or 1) + 1
        return sum(windows * length for length in asked.lengths)
    if step.protocol == "sliding" and asked.stride:
        later = {n: math.ceil(max(0, size - 1 - n) / asked.stride) for n in asked.lengths}
        return sum((1 + windows) * length for length, windows in later.items())
    return size * len(asked.lengths)


def _retrieval_tokens(asked: Eval) -> int:
    """Every question is asked of a text with the answer and of one without."""
    found = asked.retrieval
    if found is None:
        return 0
    questions = sum(ROWS_A_CELL[task] for task in found.tasks) * len(found.depths) * found.samples
    return 2 * questions * sum(found.lengths)


def _split_tokens(run: Run, split: str) -> int | None:
    """From the sidecars of prepared data; None before they are prepared."""
    total = 0
    for prefix in data_prefixes(run.config, [split]):
        try:
            total += json.loads((ROOT / f"{prefix}.json").read_text(encoding="utf-8"))["tokens"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return total or None


def _measured(plan: Plan) -> float | None:
    """Median training speed of the runs that are there."""
    speeds = []
    for run in plan.runs:
        log = run.folder / "log.jsonl"
        if log.is_file():
            found = re.findall(r'"tokens_per_second": ?([\d.e+]+)', log.read_text(encoding="utf-8"))
            speeds += [float(found[-1])] if found else []
    return statistics.median(speeds) if speeds else None


def _models(runs: Sequence[Run]) -> tuple[Model, ...]:
    """One description for each size of model and batch; methods differ by a few parameters only."""
    found: dict[tuple[object, ...], Model] = {}
    for run in runs:
        config = run.config
        shape = (config.num_layers, config.hidden_size, config.num_attention_heads)
        batch = (config.seq_length, batch_arithmetic(config, 1))
        key = (shape, batch, config.effective_precision, config.zero_stage)
        if key not in found:
            found[key] = _describe(run)
    return tuple(found.values())


def _describe(run: Run) -> Model:
    """Ask the launcher, which knows the formulas, in a process of its own."""
    arguments = list(run.train.arguments)
    prepared = all((ROOT / f"{p}.json").is_file() for p in data_prefixes(run.config, ["train"]))
    if not prepared and run.config.padded_vocab_size is None:
        arguments[1:1] = ["--set", f"padded_vocab_size={ASSUMED_VOCABULARY}"]
    arguments.insert(1, "--dry-run")
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    length = run.config.seq_length
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Model(length, f"unknown: {why}", None)
    lines = dict(
        line.split("  ", 1)
        for line in done.stdout.splitlines()
        if line.startswith(("model ", "memory ", "batch "))
    )
    told = {key.strip(): value.strip() for key, value in lines.items()}
    memory = re.search(r"about ([\d.]+) GB", told.get("memory", ""))
    summary = f"{told.get('model', 'unknown')}; {told.get('batch', '')}"
    return Model(length, summary, float(memory.group(1)) if memory else None)


def report(plan: Plan, cost: Cost, parallel: int, device: str) -> str:
    """The text that a sweep prints before it starts anything."""
    study = plan.study
    sizes = [
        _count(len(study.methods), "method"),
        _count(len(study.datasets), "dataset"),
        _count(len(study.seeds), "seed"),
        _count(len(study.train_lengths), "training length"),
        *(_count(len(levels), f"{factor} level") for factor, levels in study.factors.items()),
    ]
    asked = study.eval
    cells = sum(plan.cells(run) for run in plan.runs)
    todo = plan.unfinished
    steps = [step for run in todo for step in plan.steps(run)]
    open_cells = sum(plan.open_cells.values())
    scored = "unknown until the data are prepared"
    if cost.evaluation_tokens is not None:
        scored = f"{cost.evaluation_tokens:,} tokens"
    lines = [
        ("study", f"{study.name}: {' x '.join(sizes)}, {len(plan.runs)} runs"),
        ("training", f"base {study.base}, cluster {study.cluster or 'none'}"),
        ("methods", " ".join(study.methods)),
        ("datasets", " ".join(study.datasets)),
        ("train at", " ".join(map(str, study.train_lengths))),
        *_questions(asked),
        ("rows", shown(study.output_dir)),
        ("finished", f"{len(plan.runs) - len(todo)} of {len(plan.runs)} runs, "
         f"{cells - open_cells} of {cells} cells"),
        ("left", f"{sum(s.trains for s in steps)} trainings of "
         f"{cost.training_tokens:,} tokens together, {open_cells} cells, evaluation: {scored}"),
    ]  # fmt: skip
    for model in cost.models:
        memory = "unknown" if model.gigabytes is None else f"about {model.gigabytes:.1f} GB a run"
        lines.append((f"at {model.train_length}", f"{model.summary}; memory {memory}"))
    lines.append(("side by side", f"{parallel} on {device}"))
    lines.append(("time", _time(cost, parallel)))
    width = max(len(key) for key, _ in lines)
    return "".join(f"{key:<{width}}  {value}\n" for key, value in lines)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _questions(asked: Eval) -> Iterator[tuple[str, str]]:
    """What is scored, a line a key of the report."""
    if asked.protocols:
        yield "score at", " ".join(map(str, asked.lengths))
        yield "by", f"{' '.join(asked.protocols)}; {' '.join(asked.splits)}; {_text(asked)}"
    if asked.window_widths != ["none"]:
        yield "windows", " ".join(map(str, asked.window_widths))
    if asked.retrieval is not None:
        found = asked.retrieval
        places = (
            f"at {' '.join(map(str, found.lengths))}, depths {' '.join(map(str, found.depths))}"
        )
        yield "retrieval", f"{' '.join(found.tasks)} {places}, {_count(found.samples, 'sample')}"


def _text(asked: Eval) -> str:
    limit = asked.max_tokens
    parts = []
    if set(asked.protocols) - {"paper"}:
        parts += ["the whole split" if limit is None else f"the first {limit:,} tokens of it"]
    if "paper" in asked.protocols:
        parts += [f"paper: {asked.paper_windows or PAPER_WINDOWS} windows a length"]
    return "; ".join(parts)


def _time(cost: Cost, parallel: int) -> str:
    hours = cost.hours(parallel)
    if hours is None:
        return "unknown before the first run; --tokens-per-second N gives an estimate"
    without = ", evaluation not counted" if cost.evaluation_tokens is None else ""
    return (
        f"about {hours:.1f} hours at {cost.tokens_per_second:,.0f} tokens/s a run "
        f"(a token scored counts a third of one trained{without})"
    )
