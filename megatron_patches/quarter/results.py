"""What a run leaves: rows, kernels, logs and a summary, each written as soon as it is known.

Every cell of the plan ends as exactly one row. `fail_rest` writes the ones that were not reached, from
whichever thread notices first that the time is up.
"""

from __future__ import annotations

import hashlib
import json
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_patches.analysis.rows import KernelRow, Row, append_kernels, append_rows
from megatron_patches.quarter.budget import OutOfTime
from megatron_patches.quarter.plan import PlanError, PlannedRun, QuarterPlan
from megatron_patches.standalone.fingerprints import write_json
from megatron_patches.training.log import append

Cell = tuple[str, str, int]  # run, protocol, length
ENGINE = "quarter_hour"
ERRORS = "errors.log"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Results:
    """The folder of one run. `common` are fields of all rows that are known before training."""

    def __init__(self, folder: Path, plan: QuarterPlan, common: dict[str, Any]) -> None:
        """Raises PlanError when the folder holds results already: two runs must not mix."""
        taken = [n for n in ("rows.jsonl", "summary.json") if (folder / n).exists()]
        if taken:
            raise PlanError(f"{folder} holds {taken[0]} of an earlier run: name another --output")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.plan, self.common = folder, plan, common
        self.summary: dict[str, Any] = {"state": "running", "study": plan.study}
        self.failed = 0
        self._of_run: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()
        self._open: dict[Cell, None] = dict.fromkeys(
            (run.name, protocol, length)
            for run in plan.runs
            for length in plan.evaluation.lengths
            for protocol in plan.evaluation.protocols
        )

    def describe(self, **facts: Any) -> None:
        """Add to summary.json, which is whole at any time."""
        with self._lock:
            self.summary |= facts
            write_json(self.folder / "summary.json", self.summary)

    def describe_run(self, run: PlannedRun, /, **facts: Any) -> None:
        with self._lock:
            own = self.summary.setdefault("runs", {}).setdefault(run.name, {})
            own |= facts
            self.describe()

    def describe_length(self, run: PlannedRun, length: int, /, **facts: Any) -> None:
        """Measurements of one scored length, in the summary of its run."""
        with self._lock:
            own = self.summary.setdefault("runs", {}).setdefault(run.name, {})
            own.setdefault("evaluation", {})[str(length)] = facts
            self.describe()

    def keep_traceback(self, where: str, error: BaseException) -> None:
        """The whole story in errors.log; rows and summary have room for its first line only."""
        if isinstance(error, OutOfTime):
            return  # says all there is to say
        self.note(f"---- {where}\n{''.join(traceback.format_exception(error))}")

    def note(self, text: str) -> None:
        """A paragraph of errors.log."""
        with self._lock, open(self.folder / ERRORS, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def trained(self, run: PlannedRun, **fields: Any) -> None:
        """Row fields that only the training decides: step, parameters, attention."""
        self._of_run[run.name] = fields

    def log(self, run: PlannedRun, numbers: dict[str, Any]) -> None:
        folder = self.folder / run.name
        folder.mkdir(exist_ok=True)
        append(folder / "log.jsonl", numbers)

    def kernels(self, rows: Sequence[KernelRow]) -> None:
        append_kernels(self.folder / "kernels.jsonl", rows)

    def cells_left(self, run: PlannedRun) -> list[Cell]:
        with self._lock:
            return [cell for cell in self._open if cell[0] == run.name]

    def record(self, run: PlannedRun, protocol: str, length: int, **result: Any) -> None:
        """One finished cell; ignored when it has its row already."""
        with self._lock:
            cell = (run.name, protocol, length)
            if cell not in self._open:
                return
            append_rows(self.folder / "rows.jsonl", [self._row(run, protocol, length, result)])
            del self._open[cell]

    def fail(self, run: PlannedRun, length: int, message: str, seconds: float = 0.0) -> None:
        """Failed rows for the open cells of one length."""
        with self._lock:
            for _, protocol, _ in [c for c in self.cells_left(run) if c[2] == length]:
                nothing: dict[str, Any] = dict.fromkeys(("loss", "perplexity", "bits_per_byte"))
                nothing |= {"tokens": 0, "windows": 0, "status": "failed", "message": message}
                self.record(run, protocol, length, seconds=seconds, **nothing)
                self.failed += 1

    def fail_run(self, run: PlannedRun, message: str) -> None:
        with self._lock:
            for length in dict.fromkeys(cell[2] for cell in self.cells_left(run)):
                self.fail(run, length, message)

    def fail_rest(self, message: str) -> None:
        with self._lock:
            for run in self.plan.runs:
                self.fail_run(run, message)

    def _row(self, run: PlannedRun, protocol: str, length: int, result: dict[str, Any]) -> Row:
        training = run.training
        fields: dict[str, Any] = {
            "method": training.pos_emb,
            "dataset": training.dataset,
            "seed": training.seed,
            "train_length": training.seq_length,
            "eval_length": length,
            "protocol": protocol,
            "split": "valid",
            "stride": length,
            "last_k": None,
            "tokenizer": self.plan.tokenizer,
            "engine": ENGINE,
            "options": run.options,
            "dtype": training.precision,
            "step": 0,
            "parameters": run.parameters,
            "attention": "none",
            "config_sha": run.config_sha,
            "trained_on": self.plan.train.fingerprint,
        }
        return Row(**{**fields, **self.common, **self._of_run.get(run.name, {}), **result})


def run_facts(
    run: PlannedRun, plan: QuarterPlan, steps: int, fields: dict[str, Any]
) -> dict[str, Any]:
    """What `collect` needs of a run, under the names of the standalone engine's config.yml and run.json."""
    training = run.training
    config = {key: getattr(training, key) for key in ("pos_emb", "dataset", "seed", "seq_length")}
    facts = {
        "data": plan.train.fingerprint,
        "tokenizer": plan.tokenizer,
        "engine": ENGINE,
        "global_batch": training.batch,
        "parameters": run.parameters,
        **fields,
    }
    return {"config": {**config, "train_iters": steps, **run.options}, "run": facts}


def trained_sha(run: PlannedRun, steps: int) -> str:
    """The hash of what was trained: the configuration of the study with the steps taken here.

    The study's own hash stands for `train_iters` steps; rows of both must not pass for one another.
    """
    facts = {"study": run.config_sha, "training": asdict(run.training), "shape": asdict(run.shape)}
    text = json.dumps({**facts, "train_iters": steps}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Watchdog:
    """Ends the process at the deadline whatever it is doing, after `last_words`."""

    def __init__(self, seconds: float, last_words: Callable[[], None]) -> None:
        self._timer = threading.Timer(max(0.0, seconds), last_words)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()
