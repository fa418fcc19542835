"""Failed steps of studies: the lines of failed.jsonl, and which of them still leave a gap.

A step (a training, or the scoring under one protocol) that failed has no rows. Tables and the report
name it, or a missing seed would look as if nobody had asked for it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Any

from megatron_patches.analysis import fields as check
from megatron_patches.analysis.aggregate import EPS, READ_WITH, WINDOW, read_with
from megatron_patches.analysis.jsonl import append_lines, read_objects

FILE = "failed.jsonl"
TRAINING = "training.jsonl"
Cell = tuple[Any, ...]  # (length,) of a scoring, (task, length, depth) of retrieval
LENGTH = re.compile("[0-9]{1,18}")  # of so many digits int() never complains
DEPTH = re.compile(r"[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Failure:
    """A step that ended with an exit code other than 0. RowError for a field of a wrong kind.

    ``step`` is as the sweep names it: ``train``, ``kernels``, ``eval PROTOCOL SPLIT ...`` or
    ``retrieval SPLIT ...``, each with ``window W`` where it reads with one.
    """

    study: str
    run: str
    step: str
    command: str
    exit_code: int  # negative: the signal that ended it
    message: str
    log: str
    when: str
    method: str
    dataset: str
    seed: int
    train_length: int  # tokens
    config_sha: str

    def __post_init__(self) -> None:
        for name in ("study", "run", "step", "command", "message", "log", "when"):
            check.text(name, getattr(self, name))
        for name in ("method", "dataset", "config_sha"):
            check.text(name, getattr(self, name))
        check.integer("exit_code", self.exit_code, -255)
        check.integer("seed", self.seed, 0)
        check.integer("train_length", self.train_length, 1)


def append_failures(path: str | os.PathLike[str], failures: Iterable[Failure]) -> None:
    """Append failures; see ``jsonl.append_lines``."""
    append_lines(path, [asdict(item) for item in failures])


def read_failures(paths: Iterable[str | os.PathLike[str]]) -> list[Failure]:
    """The failures of files, in order; RowError names file and line of what is malformed.

    Those of kernels whose file is there by now are left out: no row would tell of it. So are those of
    trainings, and of their records, that have a line in the training file beside, which need not be among
    what is shown.
    """
    read = (
        (Path(path), check.from_object(Failure, where, item))
        for path in paths
        for where, item in read_objects(path)
    )
    return [item for path, item in read if not _there(path.parent, item)]


def _there(folder: Path, item: Failure) -> bool:
    """Whether the folder of a study holds what the step was to write."""
    if item.step == "kernels":
        return (folder / "kernels" / f"{item.run}.jsonl").is_file()
    training = folder / TRAINING
    if item.step not in ("train", "record") or not training.is_file():
        return False
    lines = (line for _, line in read_objects(training))
    return any((x.get("config_sha"), x.get("status")) == (item.config_sha, "ok") for x in lines)


def open_failures(failures: Iterable[Failure], rows: Iterable[Any]) -> list[Failure]:
    """The latest failure of each step without a later success.

    ``rows`` are of any kind (evaluated, training, retrieval): one of the same configuration with
    status "ok" or "refused" answers for a training, a training row also for its record.
    For a scoring or retrieval there has to be one of the same protocol, split and window in every cell:
    each length, or each task, length and depth. Which cells those are the failed command says, or,
    where it does not, the rows of this data set and training length. A step that ended halfway leaves
    rows of its first cells, and they must not hide that the others are missing.
    """
    answered: dict[tuple[Any, ...], set[Cell]] = {}
    asked: dict[tuple[Any, ...], set[Cell]] = {}
    for row in rows:
        if row.status == "failed":
            continue
        answered.setdefault((row.config_sha, "train"), set())
        if EPS in row.options:
            continue  # no step asks for less than all keys
        if hasattr(row, "protocol"):
            kind: tuple[Any, ...] = ("eval", row.protocol, row.split, *_reading(row))
            cell: Cell = (row.eval_length,)
        elif hasattr(row, "task"):
            kind = ("retrieval", row.split, *_reading(row))
            cell = (row.task, row.eval_length, row.depth)
        else:
            answered.setdefault((row.config_sha, "record"), set())
            continue
        answered.setdefault((row.config_sha, *kind), set()).add(cell)
        asked.setdefault((row.dataset, row.train_length, *kind), set()).add(cell)
    latest = {(item.study, item.run, item.step): item for item in failures}
    return [item for item in latest.values() if not _answered(item, answered, asked)]


def _reading(row: Any) -> tuple[str, Any]:
    """How a row's weights were read: options of the position method, as in a step's title, and window."""
    return read_with(row.options.get(READ_WITH)), row.options.get(WINDOW)


def _answered(
    item: Failure,
    answered: Mapping[tuple[Any, ...], set[Cell]],
    asked: Mapping[tuple[Any, ...], set[Cell]],
) -> bool:
    """Whether rows show that the step succeeded after all."""
    for key in _answers(item, answered):
        if key not in answered:
            continue
        of_others = asked.get((item.dataset, item.train_length, *key[1:]), set())
        if answered[key] >= _cells(key[1], item.command, of_others):
            return True
    return False


def _cells(kind: str, command: str, of_others: set[Cell]) -> set[Cell]:
    """The cells that the command of a step names; what it leaves open is as in ``of_others``."""
    try:
        words = shlex.split(command)
    except ValueError:
        return of_others
    named: list[list[Any]] = [[int(w) for w in _values(words, "--lengths") if LENGTH.fullmatch(w)]]
    if kind == "retrieval":
        depths = [float(word) for word in _values(words, "--depths") if DEPTH.fullmatch(word)]
        named = [_values(words, "--tasks"), *named, depths]
    if not any(named):
        return of_others
    seen = [{cell[place] for cell in of_others} for place in range(len(named))]
    return set(product(*(own or others for own, others in zip(named, seen, strict=True))))


def _values(words: list[str], option: str) -> list[str]:
    """The words between an option and the next one."""
    after = words[words.index(option) + 1 :] if option in words else []
    return list(takewhile(lambda word: not word.startswith("--"), after))


def _answers(item: Failure, answered: Iterable[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """What would show that the step succeeded after all."""
    kind, window, options = _kind(item.step)
    if kind[:1] not in {("eval",), ("retrieval",)}:
        return {(item.config_sha, *kind)}
    start = (item.config_sha, *kind, options)
    if window:
        return {(*start, int(window[-1]) if window[-1].isdecimal() else window[-1])}
    # A model that was trained with a window carries it in all of its rows.
    windows = {key[-1] for key in answered if key[:-1] == start}
    return {(*start, None)} if None in windows else {(*start, window) for window in windows}


def gaps(
    failures: Iterable[Failure], rows: Collection[Any], *, unit: str = "eval"
) -> list[Failure]:
    """The failures that leave a gap beside ``rows``, one or more of what a table or figure shows.

    Those of their data sets and training lengths: trainings, and, by ``unit``, scorings under their
    protocols and splits ("eval"), retrieval of their splits ("retrieval"), records of a training
    ("train"), or kernels ("kernels"). With which window and options the weights were read makes no
    difference.
    """
    models = {(row.dataset, row.train_length) for row in rows}
    steps: set[tuple[str, ...]] = {("train",)}
    if unit == "train":
        steps.add(("record",))
    elif unit == "kernels":
        steps.add(("kernels",))
    elif unit == "eval":
        steps |= {("eval", row.protocol, row.split) for row in rows}
    else:
        steps |= {("retrieval", row.split) for row in rows}
    return [
        item
        for item in failures
        if (item.dataset, item.train_length) in models and _kind(item.step)[0] in steps
    ]


def _kind(step: str) -> tuple[tuple[str, ...], list[str], str]:
    """A step's title in parts: what was done, ``window W`` and the options, each where it has them."""
    title, comma, options = step.partition(", ")
    words = title.split()
    if words == ["retrieval"]:
        words.append("valid")  # of before there were others
    count = {"eval": 3, "retrieval": 2}.get(words[0] if words else "", 1)
    return tuple(words[:count]), words[count:], comma + options


def failure_notes(failures: Iterable[Failure]) -> tuple[str, ...]:
    """A line for each, for the foot of a table."""
    return tuple(
        f"failed: {item.run}, {item.step}: exit code {item.exit_code}: {item.message}"
        for item in failures
    )
