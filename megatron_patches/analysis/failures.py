"""Failed steps of studies: the lines of failed.jsonl, and which of them still leave a gap.

A step (a training, or the scoring under one protocol) that failed has no rows. Tables and the report
name it, or a missing seed would look as if nobody had asked for it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from megatron_patches.analysis import fields as check
from megatron_patches.analysis.aggregate import READ_WITH, WINDOW, read_with
from megatron_patches.analysis.jsonl import append_lines, read_objects

FILE = "failed.jsonl"


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

    Those of kernels whose file is there by now are left out: no row would tell of it.
    """
    read = (
        (Path(path), check.from_object(Failure, where, item))
        for path in paths
        for where, item in read_objects(path)
    )
    return [item for path, item in read if not _kernels_there(path, item)]


def _kernels_there(path: Path, item: Failure) -> bool:
    return item.step == "kernels" and (path.parent / "kernels" / f"{item.run}.jsonl").is_file()


def open_failures(failures: Iterable[Failure], rows: Iterable[Any]) -> list[Failure]:
    """The latest failure of each step without a later success.

    ``rows`` are of any kind (evaluated, training, retrieval): one of the same configuration with
    status "ok" or "refused" answers for a training, for retrieval one of the same split and window.
    For a scoring there has to be one of the same protocol, split and window at every length: those
    that the failed command names, or, where it names none, those that other runs on this data set and
    training length have. A step that ended halfway leaves rows of its first lengths, and they must not
    hide that the others are missing.
    """
    answered: dict[tuple[Any, ...], set[int]] = {}  # -> lengths, of scorings
    asked: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        if row.status == "failed":
            continue
        answered.setdefault((row.config_sha, "train"), set())
        if hasattr(row, "protocol"):
            cell = ("eval", row.protocol, row.split, *_reading(row))
            answered.setdefault((row.config_sha, *cell), set()).add(row.eval_length)
            asked.setdefault((row.dataset, row.train_length, *cell), set()).add(row.eval_length)
        elif hasattr(row, "task"):
            answered[(row.config_sha, "retrieval", row.split, *_reading(row))] = set()
    latest = {(item.study, item.run, item.step): item for item in failures}
    return [item for item in latest.values() if not _answered(item, answered, asked)]


def _reading(row: Any) -> tuple[str, Any]:
    """How a row's weights were read: options of the position method, as in a step's title, and window."""
    return read_with(row.options.get(READ_WITH)), row.options.get(WINDOW)


def _answered(
    item: Failure,
    answered: Mapping[tuple[Any, ...], set[int]],
    asked: Mapping[tuple[Any, ...], set[int]],
) -> bool:
    """Whether rows show that the step succeeded after all."""
    for key in _answers(item, answered):
        if key not in answered:
            continue
        of_others = asked.get((item.dataset, item.train_length, *key[1:]), set())
        if key[1] != "eval" or answered[key] >= (_lengths(item.command) or of_others):
            return True
    return False


def _lengths(command: str) -> set[int]:
    """The lengths that the command of a step names; none where it says nothing of them."""
    try:
        words = shlex.split(command)
    except ValueError:
        return set()
    after = words[words.index("--lengths") + 1 :] if "--lengths" in words else []
    return {int(word) for word in takewhile(str.isdecimal, after)}


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
    protocols and splits ("eval"), retrieval of their splits ("retrieval"), or records of a training
    ("train"). With which window and options the weights were read makes no difference.
    """
    models = {(row.dataset, row.train_length) for row in rows}
    steps: set[tuple[str, ...]] = {("train",)}
    if unit == "train":
        steps.add(("record",))
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
