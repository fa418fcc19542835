"""training.jsonl of a study: a line a trained run, with its curves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from megatron_patches.analysis.jsonl import RowError
from megatron_patches.analysis.run_folder import (
    failed_training_row,
    read_run_folder,
    run_record,
)
from megatron_patches.analysis.training_rows import append_training, read_training
from megatron_patches.studies.plan import Plan
from megatron_patches.studies.run import Run, identity


class Record:
    """The lines there are, and those that a sweep adds; those of a study that is followed are there.

    `say` gets a sentence for a run whose folder does not hold its whole log.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.file, self.say = plan.study.training_file, say
        self.guard = threading.Lock()
        # A configuration names its text without saying what it holds: trained again on another one, a
        # run has a line of its own.
        self.there: set[tuple[str, str]] = set()
        if self.file.is_file():
            lines = read_training(self.file)
            self.there = {(row.config_sha, row.data) for row in lines if row.status == "ok"}

    def add(self, runs: Iterable[Run]) -> int:
        """Append the missing lines of trained runs; how many."""
        added = 0
        for run in runs:
            with self.guard:
                try:
                    key = (run.sha, str(run_record(run.folder).get("data")))
                    if key in self.there:
                        continue
                    append_training(self.file, [read_run_folder(run.folder)])
                except (RowError, OSError) as error:
                    self.say(f"{run.name}: no line of {self.file.name}: {error}")
                    continue
                self.there.add(key)
                added += 1
        return added

    def failed(self, run: Run, message: str) -> None:
        """Append the line of a training that failed: its curves up to there, and why it ended.

        A sentence where the run's folder does not say what it trained; failed.jsonl names it then.
        """
        with self.guard:
            row = failed_training_row(run.folder, identity(run), message)
            if row is None:
                self.say(
                    f"{run.name}: no line of {self.file.name}: its folder tells no model or text"
                )
                return
            try:
                append_training(self.file, [row])
            except (RowError, OSError) as error:
                self.say(f"{run.name}: no line of {self.file.name}: {error}")


def record(plan: Plan, say: Callable[[str], None]) -> int:
    """Append what training.jsonl lacks of the trained runs of a plan; how many lines."""
    return Record(plan, say).add(run for run in plan.runs if run.name in plan.trained)
