"""Back home: the training logs of a finished run as training rows, for the figures and the report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_patches.analysis.rows import RowError
from megatron_patches.analysis.run_folder import read_run_folder
from megatron_patches.analysis.training_rows import TrainingRow, append_training
from megatron_patches.quarter.plan import PlanError

TRAINING = "training.jsonl"


def collect(folder: Path) -> list[TrainingRow]:
    """Write FOLDER/training.jsonl, a row a method; a failed training is a row with its reason.

    Needs the full environment (a slope is fitted). Raises PlanError where there is nothing to read or
    it was done before, RowError for a log that is damaged or not complete.
    """
    if (folder / TRAINING).exists():
        raise PlanError(f"{folder / TRAINING} is there already")
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        runs: dict[str, dict[str, Any]] = summary["runs"]
        rows = [_row(folder / name, own) for name, own in runs.items()]
    except RowError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{folder} holds no run of this script that trained ({error})") from error
    append_training(folder / TRAINING, rows)
    return rows


def _row(folder: Path, own: dict[str, Any]) -> TrainingRow:
    """The standalone engine keeps these facts in three files; JSON is YAML, too."""
    with TemporaryDirectory() as name:
        made = Path(name)
        (made / "config.yml").write_text(json.dumps(own["config"]), encoding="utf-8")
        (made / "run.json").write_text(json.dumps(own["run"]), encoding="utf-8")
        log = folder / "log.jsonl"
        if log.is_file():
            shutil.copyfile(log, made / log.name)
        else:
            (made / log.name).touch()
        return read_run_folder(made, message=own.get("failed"))
