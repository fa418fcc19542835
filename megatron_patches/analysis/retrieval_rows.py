"""Rows of retrieval tasks: one model asked one task at one length and one depth.

Every question is asked twice: of a text that holds the answer, and of a control that differs only in
not holding it. Losses are in nats per answer token, and ``gain`` = ``control_loss`` - ``loss`` is what
the model took from the place where the answer stood.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_patches.analysis import fields as check
from megatron_patches.analysis.jsonl import RowError, append_lines, read_objects
from megatron_patches.analysis.latest import latest
from megatron_patches.analysis.rows import MAX_SIZE_RATIO, Paths, canonical
from megatron_patches.analysis.validate import STATUSES

SCORES = ("exact", "token_accuracy", "control_accuracy", "loss", "control_loss", "gain")
_SAMPLES = ("losses", "control_losses", "correct", "control_correct")


@dataclass(frozen=True)
class RetrievalRow:
    """One cell. Construction validates and raises RowError naming the field.

    ``depth`` is the share of the filler that stands before the needle: 0 at the start of the window,
    1 right before the question. ``distance`` counts tokens from an answer token back to its copy.
    ``exact`` is the share of samples whose answer tokens are all the likeliest ones (what greedy
    decoding would write), ``token_accuracy`` the share of answer tokens, ``control_accuracy`` the
    same in the control. The lists hold one entry a sample: mean losses, and numbers of right tokens.

    With ``status`` "refused" (the method, or a window this short, cannot) or "failed" (it should
    have), scores and ``distance`` are None, the lists are empty and ``message`` says why.
    """

    method: str
    dataset: str
    seed: int
    train_length: int  # tokens, like every length here
    task: str
    source: str  # of the needle
    split: str
    eval_length: int
    depth: float
    samples: int
    answer_tokens: int  # scored in each sample
    distance: int | None
    exact: float | None
    token_accuracy: float | None
    control_accuracy: float | None
    loss: float | None
    control_loss: float | None
    gain: float | None
    tokenizer: str  # fingerprint
    data: str  # fingerprint of the held-out text
    questions: str  # fingerprint of needles, controls, cues, answers and their places
    config_sha: str
    git_sha: str
    engine: str
    attention: str  # the implementation that ran
    dtype: str
    step: int  # training steps taken
    parameters: int
    seconds: float
    status: str = "ok"
    message: str | None = None
    losses: list[float] = field(default_factory=list)
    control_losses: list[float] = field(default_factory=list)
    correct: list[int] = field(default_factory=list)
    control_correct: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # what tells variants of a method apart
    trained_on: str | None = None  # fingerprint of the training text; None: not recorded

    ADDED: ClassVar = ("trained_on",)

    def __post_init__(self) -> None:
        clean: dict[str, Any] = {n: check.text(n, getattr(self, n)) for n in _TEXT_FIELDS}
        clean |= {n: check.integer(n, getattr(self, n), low) for n, low in _INTEGER_FIELDS.items()}
        clean["depth"] = check.number("depth", self.depth, 0)
        clean["seconds"] = check.number("seconds", self.seconds, 0)
        clean["options"] = check.json_mapping("options", self.options)
        for name in SCORES:
            if getattr(self, name) is not None:
                low = -math.inf if name == "gain" else 0
                clean[name] = check.number(name, getattr(self, name), low)
        for name in ("losses", "control_losses"):
            clean[name] = check.numbers_list(name, getattr(self, name), 0)
        for name in ("correct", "control_correct"):
            values = check.numbers_list(name, getattr(self, name), 0)
            clean[name] = [_count(f"{name}[{i}]", value) for i, value in enumerate(values)]
        if self.distance is not None:
            clean["distance"] = check.integer("distance", self.distance, 1)
        for name in ("message", "trained_on"):
            if getattr(self, name) is not None:
                check.text(name, getattr(self, name))
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        _check_cell(self)


_TEXT_FIELDS = (
    *("method", "dataset", "task", "source", "split", "tokenizer", "data", "questions"),
    *("config_sha", "git_sha", "engine", "attention", "dtype", "status"),
)
_INTEGER_FIELDS = {
    **{"seed": 0, "train_length": 1, "eval_length": 1, "samples": 1, "answer_tokens": 1},
    **{"step": 0, "parameters": 1},
}


def _count(name: str, value: float) -> int:
    if value != int(value):
        raise RowError(f"{name}: expected a whole number, got {value!r}")
    return int(value)


def _check_cell(row: RetrievalRow) -> None:
    if row.status not in STATUSES:
        raise RowError(f"status: {row.status!r} is none of {', '.join(STATUSES)}")
    if row.depth > 1:
        raise RowError(f"depth: {row.depth!r} is more than 1")
    if row.status != "ok":
        _check_no_scores(row)
        return
    missing = [name for name in (*SCORES, "distance") if getattr(row, name) is None]
    if missing:
        raise RowError(f'{", ".join(missing)}: needed when status is "ok"')
    if row.distance is not None and row.distance > row.eval_length:
        raise RowError(f"distance: {row.distance} is more than the window of {row.eval_length}")
    for name in _SAMPLES:
        if len(getattr(row, name)) != row.samples:
            raise RowError(f"{name}: {len(getattr(row, name))} entries for {row.samples} samples")
    for name in ("correct", "control_correct"):
        if max(getattr(row, name)) > row.answer_tokens:
            raise RowError(f"{name}: more right tokens than the {row.answer_tokens} of an answer")
    for name, value in recomputed(row).items():
        stated = getattr(row, name)
        if abs(stated - value) > 1e-6 * max(1.0, abs(value)):
            raise RowError(f"{name}: {stated!r}, but the samples give {value!r}")


def _check_no_scores(row: RetrievalRow) -> None:
    if row.message is None:
        raise RowError(f"message: needed when status is {row.status!r}")
    there = [name for name in (*SCORES, "distance") if getattr(row, name) is not None]
    there += [name for name in _SAMPLES if getattr(row, name)]
    if there:
        raise RowError(f"{', '.join(there)}: must be absent when status is {row.status!r}")


def recomputed(row: RetrievalRow) -> dict[str, float]:
    """The scores of a row from its samples."""
    return scores(
        row.losses, row.control_losses, row.correct, row.control_correct, row.answer_tokens
    )


def scores(
    losses: list[float],
    control_losses: list[float],
    correct: list[int],
    control_correct: list[int],
    answer_tokens: int,
) -> dict[str, float]:
    """SCORES from the values of the samples, of which there is at least one."""
    count = len(losses)
    loss, control = math.fsum(losses) / count, math.fsum(control_losses) / count
    return {
        "exact": sum(right == answer_tokens for right in correct) / count,
        "token_accuracy": sum(correct) / (count * answer_tokens),
        "control_accuracy": sum(control_correct) / (count * answer_tokens),
        "loss": loss,
        "control_loss": control,
        "gain": control - loss,
    }


KEY_FIELDS = (
    *("method", "dataset", "seed", "train_length", "task", "source", "split", "eval_length"),
    *("depth", "data", "questions", "config_sha", "step", "options"),
)


def append_retrieval(path: str | os.PathLike[str], rows: Iterable[RetrievalRow]) -> None:
    """Append ``rows`` to the JSON-lines file ``path`` (see ``jsonl.append_lines``)."""
    append_lines(path, [dataclasses.asdict(row) for row in rows])


def read_retrieval(paths: Paths) -> list[RetrievalRow]:
    """The rows of one file or of several, in order; RowError names file and line of a bad one."""
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [
        check.from_object(RetrievalRow, where, item)
        for path in several
        for where, item in read_objects(path)
    ]


def retrieval_key(cell: RetrievalRow | Mapping[str, Any]) -> tuple[Any, ...]:
    """What identifies a cell, hashable: of a row, or of a mapping with the KEY_FIELDS of one."""
    if isinstance(cell, RetrievalRow):
        cell = {name: getattr(cell, name) for name in KEY_FIELDS}
    key = {name: cell[name] for name in KEY_FIELDS}
    # 0 and 0.0 are one depth and one hash; options are a mapping and have none.
    key["options"] = canonical(cell["options"])
    return tuple(key.values())


def latest_retrieval(rows: Iterable[RetrievalRow]) -> list[RetrievalRow]:
    """One row a cell; see ``latest.latest``."""
    return latest(
        rows,
        retrieval_key,
        lambda row: (
            f"{row.method}, {row.dataset}, seed {row.seed}, "
            f"{row.task} at {row.eval_length}, depth {row.depth:g}"
        ),
    )


# Other questions (task, source, text, needles, their number and tokens), other training or other
# arithmetic. engine and attention may differ, as in rows.py.
COMPARED_FIELDS = (
    *("dataset", "data", "split", "tokenizer", "task", "source", "questions", "samples"),
    *("answer_tokens", "train_length", "step", "dtype"),
)


def check_retrieval_comparable(rows: Iterable[RetrievalRow]) -> None:
    """RowError, with fields and values, when ``rows`` must not meet in one table or figure."""
    rows = list(rows)
    found = {name: {str(getattr(row, name)) for row in rows} for name in COMPARED_FIELDS}
    found["trained_on"] = {row.trained_on for row in rows if row.trained_on is not None}
    sizes = {row.parameters for row in rows}
    if sizes and max(sizes) > MAX_SIZE_RATIO * min(sizes):
        found["parameters"] = {str(size) for size in sizes}
    mixed = [f"{k} ({', '.join(sorted(v))})" for k, v in found.items() if len(v) > 1]
    if mixed:
        raise RowError(f"these results cannot be compared, they differ in: {'; '.join(mixed)}")
