"""What the files already hold of a study: trained runs, answered cells, kernels, the cut of the text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_patches.analysis.aggregate import EPS, READ_WITH
from megatron_patches.analysis.command import write_text
from megatron_patches.analysis.cuts import PAPER_WINDOWS
from megatron_patches.analysis.retrieval_rows import RetrievalRow, read_retrieval
from megatron_patches.analysis.rows import Row, canonical, objects, read_rows
from megatron_patches.config import ConfigError, compose, config_sha
from megatron_patches.studies.questions import ROWS_A_CELL, STRIDED
from megatron_patches.studies.run import Run
from megatron_patches.studies.schema import ROOT, Study, shown
from megatron_patches.studies.steps import Step, cells
from megatron_patches.studies.texts import check_texts

WIDTH = "sliding_window_width"
# Protocols whose windows are aligned to the longest length.
ALIGNED = ("nonoverlap", "position", "last")
Cells = tuple[tuple[Any, ...], ...]


def trained(run: Run) -> bool:
    """Whether the run's folder holds the last step of exactly this configuration."""
    latest, config = run.folder / "latest", run.folder / "config.yml"
    if not (latest.is_file() and config.is_file()):
        return False
    if latest.read_text(encoding="utf-8").strip() != f"global_step{run.config.train_iters}":
        return False
    return config_sha(compose([config])) == run.sha


def open_cells(study: Study, runs: Sequence[Run]) -> dict[tuple[str, str], Cells]:
    """(run, title of a step) -> cells without an answer.

    A refusal answers the question, too; a failed cell is tried again. Raises ConfigError where rows
    of these questions are of another text than the study would score now.
    """
    rows, retrieval = rows_of(study)
    here = shown(study.output_dir)
    check_texts(study.eval, runs, rows, f"{here}/rows.jsonl")
    check_texts(study.eval, runs, retrieval, f"{here}/retrieval.jsonl")
    scored = _scored(rows) | _retrieved(retrieval)
    return {
        (run.name, step.title): tuple(
            cell for cell in cells(study.eval, step) if (*_asked(run, step), *cell) not in scored
        )
        for run in runs
        for step in run.evaluations
    }


def rows_of(study: Study) -> tuple[list[Row], list[RetrievalRow]]:
    """The answers to this study's questions that its folder holds, of whatever runs."""
    asked = study.eval
    rows, retrieval = (study.output_dir / f"{name}.jsonl" for name in ("rows", "retrieval"))
    scored: list[Row] = []
    retrieved: list[RetrievalRow] = []
    if rows.is_file():
        scored = [row for row in read_rows(rows) if _as_asked(study, row)]
    if retrieval.is_file() and asked.retrieval is not None:
        retrieved = [
            row
            for row in read_retrieval(retrieval)
            if row.status != "failed"
            and row.samples == asked.retrieval.samples
            and row.split in asked.splits
        ]
    return scored, retrieved


def no_kernels(run: Run) -> bool:
    """Whether the kernels of a run are asked for and not there, or those of another configuration."""
    files = [ROOT / step.kernels for step in run.evaluations if step.kernels is not None]
    return any(not file.is_file() or _other_kernels(file, run) for file in files)


def _other_kernels(file: Path, run: Run) -> bool:
    first = next((item for _, item in objects(file)), {})
    # Rows of before do not say whose they are.
    return first.get("config_sha") not in (None, run.sha)


def _asked(run: Run, step: Step) -> tuple[Any, ...]:
    kind = "retrieval" if step.retrieval else step.protocol
    width = step.window or run.config.sliding_window_width
    options = canonical(step.options)
    return (run.sha, run.config.train_iters, kind, step.split, width, options)


def _scored(rows: Iterable[Row]) -> set[tuple[Any, ...]]:
    return {
        (*_model(row), row.protocol, row.split, *_reading(row), row.eval_length) for row in rows
    }


def _reading(row: Row | RetrievalRow) -> tuple[Any, str]:
    """How the weights were read: window and options of the position method."""
    return row.options.get(WIDTH), canonical(row.options.get(READ_WITH, {}))


def _model(row: Row | RetrievalRow) -> tuple[str, int]:
    return row.config_sha, row.step


def _as_asked(study: Study, row: Row) -> bool:
    """Whether a row answers a question of this study, with the options that the protocol has in it."""
    asked = study.eval
    if row.status == "failed" or row.protocol not in asked.protocols:
        return False
    if EPS in row.options:
        return False  # a study asks for exact attention
    if row.split not in asked.splits or row.eval_length not in asked.lengths:
        return False
    if row.protocol == "last" and row.last_k != asked.last_k:
        return False
    if row.protocol == "paper" and row.status == "ok":
        return row.windows == (asked.paper_windows or PAPER_WINDOWS)
    if row.protocol not in STRIDED or row.status == "refused":
        return True  # a refusal is one at any stride
    return row.stride == (asked.stride or _longest(asked.lengths, row))


def _longest(lengths: Sequence[int], row: Row) -> int:
    """Tokens between the windows of `last` where no stride was asked for: its longest length.

    Of those that the text can fill: windows at this distance cover at least their number times it.
    """
    covered = row.windows * row.stride
    return max((length for length in lengths if length <= covered), default=0)


def _retrieved(rows: Iterable[RetrievalRow]) -> set[tuple[Any, ...]]:
    """Cells for which every source of the needle has a row."""
    sources: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for row in rows:
        cell = (row.task, row.eval_length, row.depth)
        key = (*_model(row), "retrieval", row.split, *_reading(row), *cell)
        sources[key].add(row.source)
    return {key for key, found in sources.items() if len(found) >= ROWS_A_CELL[key[6]]}


def _cut(study: Study) -> dict[str, int | None]:
    """What decides which targets are scored: of each protocol that is asked for, what it has."""
    asked = study.eval
    found: dict[str, int | None] = {}
    if set(ALIGNED) & set(asked.protocols):
        found["longest"] = max(asked.lengths)
    if set(asked.protocols) - {"paper"}:
        found["max_tokens"] = asked.max_tokens
    if "paper" in asked.protocols:
        found["paper_windows"] = asked.paper_windows or PAPER_WINDOWS
    return found


def _cut_of_rows(path: Path) -> Mapping[str, Any]:
    """The content of a cut.json; empty where there is none, or no row that it could speak of."""
    rows = path.with_name("rows.jsonl")
    if not path.is_file() or not rows.is_file() or not rows.stat().st_size:
        return {}
    try:
        with open(path, "rb") as stream:
            before = json.loads(stream.read(_LONGEST_CUT))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}): {_REPAIR}") from error
    known = isinstance(before, dict) and all(
        value is None or type(value) is int for value in before.values()
    )
    if not known:
        found = repr(before)[:80]
        raise ConfigError(f"{path}: expected an object of whole numbers, found {found}: {_REPAIR}")
    return dict(before)


_LONGEST_CUT = 10_000  # bytes; one has less than a hundred
_REPAIR = "restore the file, or remove it if all rows beside it are of this study"


def check_cut(study: Study, *, write: bool = False) -> None:
    """`output` holds rows of one cut of the text; ConfigError where this study would mix in another."""
    path, cut = study.output_dir / "cut.json", _cut(study)
    before = _cut_of_rows(path)
    for key, value in cut.items():
        if before.get(key, value) != value:
            what = {"longest": "the longest of `eval.lengths`"}.get(key, f"`eval.{key}`")
            raise ConfigError(
                f"{path}: the rows there were scored with {what} {before.get(key)}, the study "
                f"has {value}, which is other text: choose another `output`"
            )
    if write and not cut.items() <= before.items():
        write_text(path, json.dumps({**before, **cut}) + "\n")
