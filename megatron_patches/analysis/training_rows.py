"""Training rows: the record of one training run, and its JSON-lines file.

Curves are as logged: one point a logged step, nothing smoothed, six significant digits. ``lm_loss`` at
a logged step is the mean over the steps since the one before, in nats per token.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_patches.analysis import fields as check
from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.jsonl import RowError, append_lines
from megatron_patches.analysis.rows import MAX_SIZE_RATIO, Paths, objects

__all__ = [
    "TrainingRow",
    "append_training",
    "comparable_training",
    "read_training",
    "training_groups",
]

STATUSES = ("ok", "failed")
KINDS = ("mean", "std", "min", "max")  # over the heads (and layers) of one position parameter
END_SHARE = 0.1  # of all steps: what the slope at the end is fitted to
Statistics = dict[str, list[float]]  # one of KINDS -> a value a logged step


@dataclass(frozen=True)
class TrainingRow:
    """One training run. Construction validates and raises RowError naming the field.

    ``lm_loss``, ``learning_rate`` and every list in ``position`` have one value for each of
    ``iterations``; ``validation_loss`` one for each of ``validation_iterations``. ``position`` holds,
    by parameter, the statistics KINDS over its heads. ``end_slope`` is the least-squares slope of
    ``lm_loss`` over the last END_SHARE of the steps, in nats per 1,000 steps, with its standard
    error; both are None where fewer than three points lie there. ``seconds`` are those of the steps,
    without validation and saving; they and ``tokens_per_second`` (the median over logged steps) are
    None where the engine does not log them. "failed" runs say why in ``message``.
    """

    method: str
    dataset: str
    seed: int
    train_length: int  # tokens
    data: str  # fingerprint of the training text
    tokenizer: str  # fingerprint
    config_sha: str
    git_sha: str
    engine: str
    train_iters: int  # training steps asked for
    step: int  # training steps taken
    global_batch: int  # sequences of train_length a step
    parameters: int
    tokens: int  # read in all steps
    seconds: float | None
    tokens_per_second: float | None
    machine: str  # its class: processor, cores, threads; never a name of a host
    iterations: list[int]
    lm_loss: list[float]
    learning_rate: list[float]
    validation_iterations: list[int]
    validation_loss: list[float]
    position: dict[str, Statistics]
    end_slope: float | None
    end_slope_error: float | None
    options: dict[str, Any] = field(default_factory=dict)  # what tells variants of a method apart
    status: str = "ok"  # one of STATUSES
    message: str | None = None

    TEXTS: ClassVar = (
        *("method", "dataset", "data", "tokenizer"),
        *("config_sha", "git_sha", "engine", "machine"),
    )
    WHOLE: ClassVar = {
        **{"seed": 0, "train_length": 1, "train_iters": 0, "step": 0, "global_batch": 1},
        **{"parameters": 1, "tokens": 0},
    }

    def __post_init__(self) -> None:
        clean: dict[str, Any] = {n: check.text(n, getattr(self, n)) for n in self.TEXTS}
        clean |= {n: check.integer(n, getattr(self, n), low) for n, low in self.WHOLE.items()}
        for name in ("seconds", "tokens_per_second", "end_slope", "end_slope_error"):
            if getattr(self, name) is not None:
                least = -float("inf") if name == "end_slope" else 0.0
                clean[name] = check.number(name, getattr(self, name), least)
        clean["options"] = check.json_mapping("options", self.options)
        for name, at in (("iterations", "lm_loss"), ("validation_iterations", "validation_loss")):
            clean[name] = _ascending(name, getattr(self, name), self.step)
            clean[at] = _curve(at, getattr(self, at), clean[name], 0.0)
        clean["learning_rate"] = _curve("learning_rate", self.learning_rate, self.iterations, 0.0)
        clean["position"] = _statistics(self.position, self.iterations)
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        self._check_whole()

    def _check_whole(self) -> None:
        if self.status not in STATUSES:
            raise RowError(f"status: {self.status!r} is none of {', '.join(STATUSES)}")
        if (self.end_slope is None) != (self.end_slope_error is None):
            raise RowError("end_slope, end_slope_error: both or neither")
        if self.status == "failed":
            check.text("message", self.message)
            return
        last = self.iterations[-1] if self.iterations else 0
        if not last == self.step == self.train_iters:
            raise RowError(
                f"iterations: end at {last}, step is {self.step}, train_iters {self.train_iters}"
            )
        if [self.tokens] != self.tokens_at([self.step]):
            raise RowError(
                f"tokens: {self.tokens} are not {self.step} steps of {self.global_batch} sequences of "
                f"{self.train_length}"
            )

    def tokens_at(self, iterations: Iterable[int]) -> list[int]:
        """Tokens read after each of ``iterations``."""
        return [self.global_batch * self.train_length * iteration for iteration in iterations]


def _ascending(name: str, values: Any, last: int) -> list[int]:
    if not isinstance(values, list | tuple):
        raise RowError(f"{name}: expected a list of integers, got {type(values).__name__}")
    steps = [check.integer(name, value, 0) for value in values]
    if any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
        raise RowError(f"{name}: not ascending")
    if steps and steps[-1] > last:
        raise RowError(f"{name}: {steps[-1]} is beyond step {last}")
    return steps


def _curve(name: str, values: Any, at: Sequence[int], least: float = -float("inf")) -> list[float]:
    numbers = check.numbers_list(name, values, least)
    if len(numbers) != len(at):
        raise RowError(f"{name}: {len(numbers)} values for {len(at)} logged steps")
    return numbers


def _statistics(position: Any, at: Sequence[int]) -> dict[str, Statistics]:
    if not isinstance(position, Mapping):
        raise RowError(f"position: expected a mapping, got {type(position).__name__}")
    clean = {}
    for name, kinds in position.items():
        check.text("position", name)
        if not isinstance(kinds, Mapping) or set(kinds) != set(KINDS):
            raise RowError(f"position.{name}: expected {', '.join(KINDS)}")
        clean[name] = {kind: _curve(f"position.{name}.{kind}", kinds[kind], at) for kind in KINDS}
        low, mean, high = (clean[name][kind] for kind in ("min", "mean", "max"))
        for a, b, c in zip(low, mean, high, strict=True):
            slack = 1e-5 * max(abs(a), abs(c))  # six digits are kept
            if not a - slack <= b <= c + slack:
                raise RowError(f"position.{name}: mean {b!r} lies outside {a!r} to {c!r}")
    return clean


def end_slope(
    iterations: Sequence[int], losses: Sequence[float], step: int
) -> tuple[float, float] | None:
    """Slope of the loss over the last END_SHARE of ``step`` steps and its standard error.

    Least squares (scipy.stats.linregress), nats per token and 1,000 steps; None for fewer than three
    points, which have no standard error.
    """
    start = (1 - END_SHARE) * step
    points = [(i / 1000, y) for i, y in zip(iterations, losses, strict=True) if i > start]
    if len(points) < 3:
        return None

    from scipy import stats

    fit = stats.linregress([x for x, _ in points], [y for _, y in points])
    return float(fit.slope), float(fit.stderr)


def append_training(path: str | os.PathLike[str], rows: Iterable[TrainingRow]) -> None:
    """Append ``rows`` to the JSON-lines file ``path`` (see ``jsonl.append_lines``)."""
    append_lines(path, [dataclasses.asdict(row) for row in rows])


def read_training(paths: Paths) -> list[TrainingRow]:
    """The rows of one file or of several, in order; RowError names file and line of a bad one."""
    return [check.from_object(TrainingRow, where, item) for where, item in objects(paths)]


# Curves that differ in one of these are of different questions: another text, another way to cut it
# into tokens, another length of sample or another schedule.
COMPARED = ("dataset", "data", "tokenizer", "train_length", "train_iters", "global_batch")


def training_groups(rows: Iterable[TrainingRow]) -> list[list[TrainingRow]]:
    """Rows that may meet in one figure, each run once (its last row), sorted by what they trained on.

    Models whose sizes differ by more than MAX_SIZE_RATIO are groups of their own. RowError when two
    runs of different configurations claim the same label and seed.
    """
    groups: dict[tuple[Any, ...], list[TrainingRow]] = {}
    for row in sorted(rows, key=lambda row: row.parameters):
        question = tuple(getattr(row, name) for name in COMPARED)
        key = (*question, 0)
        while key in groups and row.parameters > MAX_SIZE_RATIO * groups[key][0].parameters:
            key = (*question, key[-1] + 1)
        groups.setdefault(key, []).append(row)
    return [comparable_training(groups[key]) for key in sorted(groups)]


def comparable_training(rows: Iterable[TrainingRow]) -> list[TrainingRow]:
    """The last row of each run, by label and seed; RowError when there are none, or may not meet."""
    latest: dict[tuple[str, int], TrainingRow] = {}
    for row in rows:
        key = (series_label(row), row.seed)
        before = latest.get(key)
        if before is not None and before.config_sha != row.config_sha:
            raise RowError(
                f"{key[0]}, seed {row.seed}: training runs of two configurations "
                f"({before.config_sha} and {row.config_sha}) in one figure"
            )
        if before is None or row.status == "ok" or before.status != "ok":
            latest[key] = row
    kept = [latest[key] for key in sorted(latest)]
    if not kept:
        raise RowError("no training rows: nothing to show")
    found = {name: sorted({str(getattr(row, name)) for row in kept}) for name in COMPARED}
    mixed = [f"{name} ({', '.join(values)})" for name, values in found.items() if len(values) > 1]
    sizes = [row.parameters for row in kept]
    if max(sizes) > MAX_SIZE_RATIO * min(sizes):
        mixed.append(f"parameters ({min(sizes)} to {max(sizes)})")
    if mixed:
        raise RowError(f"these runs cannot be compared, they differ in: {'; '.join(mixed)}")
    return kept
