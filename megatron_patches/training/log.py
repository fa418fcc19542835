"""`log.jsonl`, the record of a run: one JSON object a logged step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def forget_after(path: Path, step: int) -> None:
    """Drop what a resumed run will do again, so that no step stands twice in the log."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if int(json.loads(line)["iteration"]) <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # a line cut by the interruption
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def append(path: Path, numbers: dict[str, Any]) -> None:
    """Add one object and have it on disk before returning to the training."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(numbers, allow_nan=True) + "\n")
