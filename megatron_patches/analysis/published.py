"""The papers' own figures, read from ``results/published.csv``."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_patches.analysis.jsonl import RowError

COLUMNS = (
    *("paper", "table", "model", "dataset", "method", "train_length", "eval_length", "value"),
    *("std", "log_significantly_better", "unit", "note"),
)
# The method against which KERPLE's tables test all others.
REFERENCE = "kerple_log"
# The file writes three kernels as KERPLE's tables do; the suite has its own names for them.
SUITE_NAMES = {
    "kerple_wht1": "kerple_weight1",
    "kerple_wht2": "kerple_weight",
    "kerple_bias_wht": "kerple_power_weight",
}


@dataclass(frozen=True)
class PublishedRow:
    """One published figure. ``value`` is None where the paper has no number (see ``note``).

    ``method`` is the suite's name; lengths are in tokens; ``value_text`` and ``std_text`` keep the
    digits as printed. ``log_significantly_better`` is the paper's dagger.
    """

    paper: str
    table: str
    model: str
    dataset: str
    method: str
    train_length: int
    eval_length: int
    value: float | None
    std: float | None
    log_significantly_better: bool
    unit: str
    note: str
    value_text: str
    std_text: str


def read_published(path: str | os.PathLike[str]) -> list[PublishedRow]:
    """All figures of ``path`` in order; RowError names file and line of a bad one."""
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise RowError(f"{path}:1: expected the columns {','.join(COLUMNS)}")
            return [_row(f"{path}:{reader.line_num}", record) for record in reader]
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise RowError(f"{path}: cannot be read: {error}") from error


def _row(where: str, record: dict[str, str]) -> PublishedRow:
    # A record that is too short has None values, one that is too long has the key None.
    if None in record or None in record.values():
        raise RowError(f"{where}: expected {len(COLUMNS)} columns")
    marks = {"0": False, "1": True}
    try:
        return PublishedRow(
            paper=record["paper"],
            table=record["table"],
            model=record["model"],
            dataset=record["dataset"],
            method=SUITE_NAMES.get(record["method"], record["method"]),
            train_length=int(record["train_length"]),
            eval_length=int(record["eval_length"]),
            value=float(record["value"]) if record["value"] else None,
            std=float(record["std"]) if record["std"] else None,
            log_significantly_better=marks[record["log_significantly_better"]],
            unit=record["unit"],
            note=record["note"],
            value_text=record["value"],
            std_text=record["std"],
        )
    except (KeyError, ValueError) as error:
        raise RowError(f"{where}: bad value: {error}") from error


def query(
    rows: Iterable[PublishedRow],
    *,
    paper: str | None = None,
    table: str | None = None,
    model: str | None = None,
    dataset: str | None = None,
    method: str | None = None,
    train_length: int | None = None,
    eval_length: int | None = None,
) -> list[PublishedRow]:
    """The figures that match every condition given (None matches all)."""
    conditions = {
        "paper": paper,
        "table": table,
        "model": model,
        "dataset": dataset,
        "method": method,
        "train_length": train_length,
        "eval_length": eval_length,
    }
    wanted = {name: value for name, value in conditions.items() if value is not None}
    return [row for row in rows if all(getattr(row, k) == v for k, v in wanted.items())]


def published_ratio(
    rows: Iterable[PublishedRow], method: str, eval_length: int, base_length: int
) -> float | None:
    """Perplexity at one length divided by that at another; None where either is not published."""
    values = {row.eval_length: row.value for row in query(rows, method=method)}
    above, below = values.get(eval_length), values.get(base_length)
    return None if above is None or below is None else above / below
