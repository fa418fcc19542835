"""What the files already hold of a study: trained runs, scored cells, and the cut of their text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_patches.analysis.retrieval_rows import RetrievalRow, read_retrieval
from megatron_patches.analysis.rows import Row, read_rows
from megatron_patches.config import ConfigError, compose, config_sha
from megatron_patches.studies.questions import ROWS_A_CELL, STRIDED
from megatron_patches.studies.schema import Study
from megatron_patches.studies.steps import Step, cells

if TYPE_CHECKING:
    from megatron_patches.studies.plan import Run

# Of the authors' evaluation; `eval.py` has the same number.
PAPER_WINDOWS = 320
WIDTH = "sliding_window_width"


def trained(run: Run) -> bool:
    """Whether the run's folder holds the last step of exactly this configuration."""
    latest, config = run.folder / "latest", run.folder / "config.yml"
    if not (latest.is_file() and config.is_file()):
        return False
    if latest.read_text(encoding="utf-8").strip() != f"global_step{run.config.train_iters}":
        return False
    return config_sha(compose([config])) == run.sha


def open_cells(study: Study, runs: Iterable[Run]) -> dict[tuple[str, str], int]:
    """(run, title of a step) -> cells without a result.

    A refusal answers the question, too; a failed cell is tried again.
    """
    scored = _scored(study)
    return {
        (run.name, step.title): sum(
            (*_asked(run, step), *cell) not in scored for cell in cells(study.eval, step)
        )
        for run in runs
        for step in run.evaluations
    }


def _asked(run: Run, step: Step) -> tuple[Any, ...]:
    kind = ("retrieval", "valid") if step.retrieval else (step.protocol, step.split)
    return (run.sha, run.config.train_iters, *kind, step.window or run.config.sliding_window_width)


def _scored(study: Study) -> set[tuple[Any, ...]]:
    found: set[tuple[Any, ...]] = set()
    rows, retrieval = (study.output_dir / f"{name}.jsonl" for name in ("rows", "retrieval"))
    if rows.is_file():
        found |= {
            (*_model(row), row.protocol, row.split, row.options.get(WIDTH), row.eval_length)
            for row in read_rows(rows)
            if row.status != "failed" and _as_asked(study, row)
        }
    if retrieval.is_file() and study.eval.retrieval is not None:
        found |= _retrieved(read_retrieval(retrieval), study.eval.retrieval.samples)
    return found


def _model(row: Row | RetrievalRow) -> tuple[str, int]:
    return row.config_sha, row.step


def _as_asked(study: Study, row: Row) -> bool:
    """Whether a row was scored with the options that its protocol has in this study."""
    asked = study.eval
    if row.protocol == "last" and row.last_k != asked.last_k:
        return False
    if row.protocol == "paper" and row.status == "ok":
        return row.windows == (asked.paper_windows or PAPER_WINDOWS)
    return row.protocol not in STRIDED or asked.stride is None or row.stride == asked.stride


def _retrieved(rows: Iterable[RetrievalRow], samples: int) -> set[tuple[Any, ...]]:
    """Cells for which every source of the needle has a row."""
    sources: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for row in rows:
        if row.status != "failed" and row.samples == samples:
            cell = (row.task, row.eval_length, row.depth)
            key = (*_model(row), "retrieval", row.split, row.options.get(WIDTH), *cell)
            sources[key].add(row.source)
    return {key for key, found in sources.items() if len(found) >= ROWS_A_CELL[key[5]]}


def _cut(study: Study) -> dict[str, int | None]:
    asked = study.eval
    found: dict[str, int | None] = {}
    if asked.protocols:
        found = {"longest": max(asked.lengths), "max_tokens": asked.max_tokens}
    if "paper" in asked.protocols:
        found["paper_windows"] = asked.paper_windows or PAPER_WINDOWS
    return found


def check_cut(study: Study, *, write: bool = False) -> None:
    """`output` holds rows of one cut of the text; ConfigError where this study would mix in another."""
    path, cut = study.output_dir / "cut.json", _cut(study)
    before: Mapping[str, int | None] = {}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
    for key, value in cut.items():
        if before.get(key, value) != value:
            what = {"longest": "the longest of `eval.lengths`"}.get(key, f"`eval.{key}`")
            raise ConfigError(
                f"{path}: the rows there were scored with {what} {before.get(key)}, the study "
                f"has {value}, which is other text: choose another `output`"
            )
    if write and not cut.items() <= before.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**before, **cut}) + "\n", encoding="utf-8")
