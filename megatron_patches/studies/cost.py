"""What a plan costs: runs, tokens, memory, hours; read from configurations, data files and logs."""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_patches.analysis.cuts import PAPER_WINDOWS
from megatron_patches.config import batch_arithmetic
from megatron_patches.config.reading import flow_yaml
from megatron_patches.studies.plan import Plan
from megatron_patches.studies.questions import ROWS_A_CELL, Eval
from megatron_patches.studies.run import Run
from megatron_patches.studies.schema import ROOT, shown
from megatron_patches.studies.speed import Speeds, expected_vocabulary, measured_speeds
from megatron_patches.studies.steps import Step
from megatron_patches.studies.texts import Library, data_prefixes

Seconds = tuple[float, ...]


@dataclass(frozen=True)
class Cost:
    """Of what is left. `evaluation_tokens` is None where the text's size is not known yet.

    `seconds` holds a figure for each unfinished run by itself, without its evaluation where the
    size of its text is not known; None before any speed is known.
    """

    training_tokens: int
    evaluation_tokens: int | None
    models: tuple[Model, ...]
    tokens_per_second: float | None  # of one training process
    seconds: Seconds | None = None

    @property
    def gigabytes(self) -> float | None:
        """The estimated memory of the largest run."""
        known = [model.gigabytes for model in self.models if model.gigabytes is not None]
        return max(known, default=None)

    def hours(self, parallel: int) -> float | None:
        """Until all is done, `parallel` runs at a time: no run is shared, and the longest is waited for."""
        if self.seconds is None:
            return None
        places = max(1, min(parallel, len(self.seconds)))
        return max(sum(self.seconds) / places, max(self.seconds, default=0.0)) / 3600

    @property
    def longest_hours(self) -> float | None:
        """Of the longest run; None where some part of it is not known."""
        if not self.seconds or self.evaluation_tokens is None:
            return None
        return max(self.seconds) / 3600


@dataclass(frozen=True)
class Model:
    """One size of model and batch in the study, as `deepy.py --dry-run` describes it."""

    train_length: int
    summary: str
    gigabytes: float | None


def estimate(plan: Plan, tokens_per_second: float | None = None) -> Cost:
    """The cost of the unfinished runs, at the speeds of the finished ones.

    `tokens_per_second` is a training speed to reckon with instead.
    """
    runs, speeds = plan.unfinished, measured_speeds(plan, tokens_per_second)
    parts = [_cost_of(plan, run, speeds) for run in runs]
    scoring = [part.scoring for part in parts]
    seconds = [part.seconds for part in parts]
    medians = list(speeds.training.values())
    return Cost(
        training_tokens=sum(part.training for part in parts),
        evaluation_tokens=None if None in scoring else sum(n for n in scoring if n is not None),
        models=_models(runs),
        tokens_per_second=tokens_per_second or (statistics.median(medians) if medians else None),
        seconds=None if None in seconds else tuple(s for s in seconds if s is not None),
    )


@dataclass(frozen=True)
class _Part:
    """Of one run. `scoring` None: the text is not prepared; `seconds` None: no speed is known."""

    training: int
    scoring: int | None
    seconds: float | None


def _cost_of(plan: Plan, run: Run, speeds: Speeds) -> _Part:
    training, scoring, unknown = 0, 0, False
    seconds: list[float | None] = []
    for step in plan.steps(run):
        if step.trains:
            training = _training_tokens(run)
            seconds.append(_duration(training, speeds.train(run)))
        for cell in () if step.trains or step.kernels else plan.left[run.name, step.title]:
            length = cell[1] if step.retrieval else cell[0]
            tokens = _cell_tokens(plan.study.eval, run, step, cell, speeds.library)
            unknown |= tokens is None
            scoring += tokens or 0
            if tokens:
                place = (length, step.window or run.config.sliding_window_width)
                seconds.append(_duration(tokens, speeds.score(run, place)))
    total = None if None in seconds else sum(s for s in seconds if s is not None)
    return _Part(training, None if unknown else scoring, total)


def _duration(tokens: int, speed: float | None) -> float | None:
    return None if speed is None else tokens / speed


def _training_tokens(run: Run) -> int:
    config = run.config
    return batch_arithmetic(config, 1).global_ * config.seq_length * config.train_iters


def _cell_tokens(
    asked: Eval, run: Run, step: Step, cell: tuple[Any, ...], library: Library
) -> int | None:
    """Tokens that pass through the model for one cell; None before the text is prepared."""
    if step.retrieval:
        assert asked.retrieval is not None
        # Every question is asked of a text with the answer and of one without.
        return 2 * ROWS_A_CELL[cell[0]] * asked.retrieval.samples * int(cell[1])
    length = int(cell[0])
    if step.protocol == "paper":
        return (asked.paper_windows or PAPER_WINDOWS) * length
    text = library.text(run.config, step.split or "valid")
    known = (None if text is None else text.tokens, asked.max_tokens)
    sizes = [size for size in known if size is not None]
    if not sizes:
        return None
    size = min(sizes)
    if step.protocol == "last":
        longest = max((n for n in asked.lengths if n < size), default=0)
        windows = max(0, size - 1 - longest) // (asked.stride or longest or 1) + 1
        return windows * length
    if step.protocol == "sliding" and asked.stride:
        return (1 + math.ceil(max(0, size - 1 - length) / asked.stride)) * length
    return size


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
    assumed = not prepared and run.config.padded_vocab_size is None
    if assumed:
        arguments[1:1] = ["--set", f"padded_vocab_size={expected_vocabulary(run.config)}"]
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
    if assumed:
        summary += "; the vocabulary is assumed until the text is prepared"
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
    files = sum(step.kernels is not None for step in steps)
    kernels = f", {_count(files, 'file')} of kernels" if files else ""
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
         f"{cost.training_tokens:,} tokens together, {open_cells} cells{kernels}, evaluation: {scored}"),
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
    if asked.position_options != ["none"]:
        yield "read with", "; ".join(map(flow_yaml, asked.position_options))
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
    speed = cost.tokens_per_second
    at = "" if speed is None else f" at {speed:,.0f} tokens/s of training a run"
    without = ", evaluation not counted" if cost.evaluation_tokens is None else ""
    return f"about {hours:.1f} hours{at}{without}"
