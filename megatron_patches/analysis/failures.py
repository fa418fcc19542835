"""Failed steps of studies: the lines of failed.jsonl, and which of them still leave a gap.

A step (a training, or the scoring under one protocol) that failed has no rows. Tables and the report
name it, or a missing seed would look as if nobody had asked for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_patches.analysis import fields as check
from megatron_patches.analysis.jsonl import append_lines, read_objects

FILE = "failed.jsonl"


@dataclass(frozen=True)
class Failure:
    """A step that ended with an exit code other than 0. RowError for a field of a wrong kind.

    ``step`` is as the sweep names it: ``train``, ``eval PROTOCOL SPLIT ...`` or ``retrieval``.
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
    """The failures of files, in order; RowError names file and line of what is malformed."""
    return [
        check.from_object(Failure, where, item)
        for path in paths
        for where, item in read_objects(path)
    ]


def open_failures(failures: Iterable[Failure], rows: Iterable[Any]) -> list[Failure]:
    """The latest failure of each step without a later success.

    ``rows`` are of any kind (evaluated, training, retrieval): one of the same configuration with
    status "ok" or "refused" answers for a training; for a scoring it has to be of the same protocol,
    split and window, for retrieval of that kind.
    """
    answered: set[tuple[Any, ...]] = set()
    for row in rows:
        if row.status == "failed":
            continue
        answered.add((row.config_sha, "train"))
        if hasattr(row, "protocol"):
            window = row.options.get("sliding_window_width")
            answered.add((row.config_sha, "eval", row.protocol, row.split, window))
        elif hasattr(row, "task"):
            answered.add((row.config_sha, "retrieval"))
    latest = {(item.study, item.run, item.step): item for item in failures}
    return [item for item in latest.values() if not answered & _answers(item, answered)]


def _answers(item: Failure, answered: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """What would show that the step succeeded after all."""
    words = item.step.split()
    if words[0] != "eval":
        return {(item.config_sha, words[0])}
    start = (item.config_sha, *words[:3])
    if len(words) > 3:  # eval PROTOCOL SPLIT window W
        return {(*start, int(words[4]))}
    # A model that was trained with a window carries it in all of its rows.
    windows = {key[4] for key in answered if key[:4] == start}
    return {(*start, None)} if None in windows else {(*start, window) for window in windows}


def failure_notes(failures: Iterable[Failure]) -> tuple[str, ...]:
    """A line for each, for the foot of a table."""
    return tuple(
        f"failed: {item.run}, {item.step}: exit code {item.exit_code}: {item.message}"
        for item in failures
    )
