"""Rows: the schema of one evaluated cell and of one learned kernel, and their JSON-lines files.

A cell is one model (method, dataset, seed, step) scored at one length under one protocol. Losses
are in nats per token, perplexity is exp(loss). Rows are append-only data; every table and figure
is a pure function of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_patches.analysis import fields as check
from megatron_patches.analysis.jsonl import RowError, append_lines, read_objects
from megatron_patches.analysis.latest import latest
from megatron_patches.analysis.validate import PROTOCOLS, STATUSES, WHOLE_WINDOW, check_cell

__all__ = [
    "CELL_FIELDS",
    "PROTOCOLS",
    "STATUSES",
    "WHOLE_WINDOW",
    "KernelRow",
    "Row",
    "RowError",
    "append_kernels",
    "append_rows",
    "canonical",
    "cell_key",
    "check_comparable",
    "latest_rows",
    "objects",
    "read_kernels",
    "read_rows",
]

# Methods add few parameters of their own (a learned position table in a tiny model the most).
MAX_SIZE_RATIO = 1.5

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True)
class Row:
    """One evaluated cell. Construction validates and raises RowError naming the field.

    ``status`` "ok" has finite ``loss`` and ``perplexity`` and one entry of ``window_losses`` per
    window, in the order scored. "refused" (the method cannot do this cell) and "failed" (it should
    have) have none of them and say why in ``message``.
    ``position_losses`` holds the mean loss in n bins of equal width over the positions of a
    window; only the protocols that score whole windows may carry it, and "position" must.
    """

    method: str
    dataset: str
    seed: int
    train_length: int  # tokens, like every length here
    eval_length: int
    protocol: str  # one of PROTOCOLS
    split: str
    stride: int  # tokens between the starts of windows; eval_length where windows tile the text
    last_k: int | None  # tokens scored at the end of a window; protocol "last" only
    loss: float | None  # nats per token
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int  # tokens scored
    windows: int
    tokenizer: str  # fingerprint
    data: str  # fingerprint
    config_sha: str
    git_sha: str
    engine: str
    attention: str  # the implementation that ran
    dtype: str
    step: int  # training steps taken
    parameters: int
    seconds: float
    status: str = "ok"  # one of STATUSES
    message: str | None = None
    window_losses: list[float] = field(default_factory=list)
    position_losses: list[float] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # what tells variants of a method apart
    documents_isolated: bool = False  # True: no attention across documents
    trained_on: str | None = None  # fingerprint of the training text; None: not recorded

    ADDED: ClassVar = ("trained_on",)

    def __post_init__(self) -> None:
        clean: dict[str, Any] = {
            name: check.text(name, getattr(self, name)) for name in _TEXT_FIELDS
        }
        clean |= {n: check.integer(n, getattr(self, n), low) for n, low in _INTEGER_FIELDS.items()}
        clean["seconds"] = check.number("seconds", self.seconds, 0)
        clean["window_losses"] = check.numbers_list("window_losses", self.window_losses, 0)
        clean["options"] = check.json_mapping("options", self.options)
        for name in ("loss", "perplexity", "bits_per_byte"):
            if getattr(self, name) is not None:
                clean[name] = check.number(name, getattr(self, name), 0)
        if self.position_losses is not None:
            clean["position_losses"] = check.numbers_list(
                "position_losses", self.position_losses, 0
            )
        if self.last_k is not None:
            clean["last_k"] = check.integer("last_k", self.last_k, 1)
        for name in ("message", "trained_on"):
            if getattr(self, name) is not None:
                check.text(name, getattr(self, name))
        if not isinstance(self.documents_isolated, bool):
            raise RowError(f"documents_isolated: expected a bool, got {self.documents_isolated!r}")
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        check_cell(self)


_TEXT_FIELDS = (
    *("method", "dataset", "protocol", "split", "tokenizer", "data"),
    *("config_sha", "git_sha", "engine", "attention", "dtype", "status"),
)
_INTEGER_FIELDS = {
    **{"seed": 0, "train_length": 1, "eval_length": 1, "stride": 1},
    **{"tokens": 0, "windows": 0, "step": 0, "parameters": 1},
}


@dataclass(frozen=True)
class KernelRow:
    """The learned position kernel of one head after ``step`` training steps.

    ``distances`` are query minus key positions in tokens, ascending; ``bias`` (added to the scaled
    scores) and ``weight`` (multiplies them) hold one value a distance, or None where the method
    has no such part. ``layer`` is None where all layers share the kernel. ``effective_length`` is
    the smallest distance of all integers up to ``searched_to`` whose bias is more than 2 below that
    at distance 0, None where there is none; rows without ``config_sha`` hold the older one, of a bias
    below -2 (the same where the bias at 0 is 0). ``model_parameters`` counts those of the whole model.
    Rows of before these fields existed lack them and those that tell runs apart.
    """

    method: str
    dataset: str
    seed: int
    step: int
    head: int
    parameters: dict[str, float]
    distances: list[int]
    bias: list[float] | None
    weight: list[float] | None
    layer: int | None = None
    train_length: int | None = None  # tokens
    options: dict[str, Any] = field(default_factory=dict)  # as in Row
    searched_to: int | None = None  # tokens
    effective_length: int | None = None  # tokens
    config_sha: str | None = None
    model_parameters: int | None = None

    ADDED: ClassVar = (
        *("train_length", "options", "searched_to", "effective_length"),
        *("config_sha", "model_parameters"),
    )

    def __post_init__(self) -> None:
        clean: dict[str, Any] = {n: check.text(n, getattr(self, n)) for n in ("method", "dataset")}
        clean |= {n: check.integer(n, getattr(self, n), 0) for n in ("seed", "step", "head")}
        least = {"layer": 0, "train_length": 1, "searched_to": 0, "effective_length": 0}
        least["model_parameters"] = 1
        for name, low in least.items():
            if getattr(self, name) is not None:
                clean[name] = check.integer(name, getattr(self, name), low)
        if self.config_sha is not None:
            check.text("config_sha", self.config_sha)
        clean["options"] = check.json_mapping("options", self.options)
        values = check.json_mapping("parameters", self.parameters)
        clean["parameters"] = {k: check.number(f"parameters.{k}", v) for k, v in values.items()}
        if not isinstance(self.distances, list | tuple) or not self.distances:
            raise RowError("distances: expected a list with at least one distance")
        distances = [check.integer("distances", value, 0) for value in self.distances]
        if any(a >= b for a, b in zip(distances, distances[1:], strict=False)):
            raise RowError("distances: not ascending")
        clean["distances"] = distances
        for name in ("bias", "weight"):
            if getattr(self, name) is not None:
                clean[name] = check.numbers_list(name, getattr(self, name))
                if len(clean[name]) != len(distances):
                    raise RowError(f"{name}: {len(clean[name])} values, {len(distances)} distances")
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        end, searched = self.effective_length, self.searched_to
        if end is not None and (searched is None or end > searched):
            raise RowError(f"effective_length: {end}, but searched to {searched}")


# options and documents_isolated are part of the key because both can be set at evaluation, where
# the configuration of the trained model stays the same.
CELL_FIELDS = (
    *("method", "dataset", "seed", "train_length", "eval_length", "protocol", "split", "stride"),
    *("last_k", "config_sha", "step", "data", "options", "documents_isolated"),
)


def append_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Append ``rows`` to the JSON-lines file ``path`` (see ``jsonl.append_lines``)."""
    append_lines(path, [dataclasses.asdict(row) for row in rows])


def read_rows(paths: Paths) -> list[Row]:
    """The rows of one file or of several, in order; RowError names file and line of a bad one."""
    return [check.from_object(Row, where, item) for where, item in objects(paths)]


def append_kernels(path: str | os.PathLike[str], rows: Iterable[KernelRow]) -> None:
    """Append learned kernels to their own JSON-lines file (see ``jsonl.append_lines``)."""
    append_lines(path, [dataclasses.asdict(row) for row in rows])


def read_kernels(paths: Paths) -> list[KernelRow]:
    """The learned kernels of one file or of several; RowError names file and line of a bad one."""
    return [check.from_object(KernelRow, where, item) for where, item in objects(paths)]


def objects(paths: Paths) -> Iterator[tuple[str, dict[str, Any]]]:
    """``("file:line", object)`` for each line of one file or of several."""
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    return (pair for path in several for pair in read_objects(path))


def cell_key(cell: Row | Mapping[str, Any]) -> tuple[Any, ...]:
    """What identifies a cell, hashable, so that a resumed sweep can skip finished ones.

    ``cell`` is a row, or a mapping with the CELL_FIELDS of a cell still to be run (``options``
    and ``documents_isolated`` may be left out; KeyError on any other).
    """
    if isinstance(cell, Row):
        cell = {name: getattr(cell, name) for name in CELL_FIELDS}
    else:
        cell = {"options": {}, "documents_isolated": False, **cell}
    key = {name: cell[name] for name in CELL_FIELDS}
    key["options"] = canonical(cell["options"])
    return tuple(key.values())


def canonical(options: Mapping[str, Any]) -> str:
    """Options as JSON text that does not depend on the order of their keys."""
    return json.dumps(options, sort_keys=True, allow_nan=False)


def latest_rows(rows: Iterable[Row]) -> list[Row]:
    """One row a cell; see ``latest``."""
    return latest(
        rows,
        cell_key,
        lambda row: f"{row.method}, {row.dataset}, seed {row.seed}, length {row.eval_length}",
    )


# Rows that differ in one of these answer different questions and never meet in one table:
# another text (dataset, data, split), another way to cut it into tokens or windows (tokenizer,
# protocol, last_k, documents_isolated), other training (train_length, step) or arithmetic whose
# error is of the size of the effects (dtype). engine and attention may differ: tests hold them
# equal, and tables print them. stride and the number of tokens have rules of their own below.
COMPARED_FIELDS = (
    *("dataset", "data", "split", "tokenizer", "protocol", "last_k", "documents_isolated"),
    *("train_length", "step", "dtype"),
)


def check_comparable(rows: Iterable[Row]) -> None:
    """RowError, with fields and values, when ``rows`` must not meet in one table.

    Besides COMPARED_FIELDS: one training text as far as rows say theirs, one stride for all rows
    (or, for windows side by side, each row its own length), the same windows and tokens for all
    scored rows of one length, and models of one size (MAX_SIZE_RATIO).
    """
    rows = list(rows)
    found = {name: {str(getattr(row, name)) for row in rows} for name in COMPARED_FIELDS}
    found["trained_on"] = {row.trained_on for row in rows if row.trained_on is not None}
    if not all(row.protocol in WHOLE_WINDOW for row in rows):
        found["stride"] = {str(row.stride) for row in rows}
    for length in sorted({row.eval_length for row in rows}):
        scored = [row for row in rows if row.eval_length == length and row.status == "ok"]
        found[f"windows at length {length}"] = {str(row.windows) for row in scored}
        found[f"tokens at length {length}"] = {str(row.tokens) for row in scored}
    sizes = {row.parameters for row in rows}
    if sizes and max(sizes) > MAX_SIZE_RATIO * min(sizes):
        found["parameters"] = {str(size) for size in sizes}
    mixed = [f"{k} ({', '.join(sorted(v))})" for k, v in found.items() if len(v) > 1]
    if mixed:
        raise RowError(f"these results cannot be compared, they differ in: {'; '.join(mixed)}")
