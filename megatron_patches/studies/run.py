"""One run of a study: its configuration, its commands, and what names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_patches.config import Config
from megatron_patches.studies.steps import Step


@dataclass(frozen=True)
class Run:
    """One model: trained once, asked everything."""

    name: str
    files: tuple[str, ...]
    changes: tuple[str, ...]  # key=value, as after --set
    config: Config
    sha: str
    folder: Path
    levels: Mapping[str, str]
    train: Step
    evaluations: tuple[Step, ...]


def identity(run: Run) -> dict[str, Any]:
    """What a line of failed.jsonl says of the run, in the terms of result rows."""
    return {
        "method": run.config.pos_emb,
        "dataset": run.config.dataset_name,
        "seed": run.config.seed,
        "train_length": run.config.seq_length,
        "config_sha": run.sha,
    }
