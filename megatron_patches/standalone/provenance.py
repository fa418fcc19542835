"""Where numbers come from: the commit, the data, the tokenizer."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset
from megatron_patches.config import ConfigError


def git_sha() -> str:
    """Twelve digits of the commit that runs, `-dirty` with uncommitted changes, or `unknown`."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        sha = git("rev-parse", "--short=12", "HEAD")
        # Results and runs are written while the code stays the same.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (sha + ("-dirty" if changed else "")) if sha else "unknown"


def data_fingerprint(datasets: Sequence[IndexedDataset], extra: str = "") -> str:
    """16 hex digits for the text of a split; `extra` tells parts of one file apart."""
    parts = [dataset.fingerprint for dataset in datasets]
    if len(parts) == 1 and not extra:
        return parts[0]
    return hashlib.sha256(" ".join([*parts, extra]).encode()).hexdigest()[:16]


def tokenizer_fingerprint(datasets: Sequence[IndexedDataset]) -> str:
    """What the sidecars say, `unknown` without one; DataError if they contradict each other."""
    found = {
        str(d.sidecar["tokenizer"]["fingerprint"])
        for d in datasets
        if d.sidecar is not None and "tokenizer" in d.sidecar
    }
    if len(found) > 1:
        prefixes = ", ".join(str(d.prefix) for d in datasets)
        raise DataError(f"{prefixes} were prepared with different tokenizers ({', '.join(found)})")
    return found.pop() if found else "unknown"


def tokens_per_byte(datasets: Sequence[IndexedDataset]) -> float | None:
    """Of the whole split, for bits per byte; None when a sidecar is missing."""
    sidecars = [
        d.sidecar for d in datasets if d.sidecar is not None and d.sidecar.get("text_bytes")
    ]
    if len(sidecars) != len(datasets):
        return None
    return sum(s["tokens"] for s in sidecars) / sum(s["text_bytes"] for s in sidecars)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second run out of a folder; ConfigError when there is one already."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{folder}: another process is training in it") from error
        yield


def read_run(path: str | Path) -> dict[str, Any]:
    """`run.json` of a run folder or of the one above a step folder; empty for foreign checkpoints."""
    for folder in (Path(path), Path(path).parent):
        file = folder / "run.json"
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return content
    return {}


def check_same_run(source: Path, now: dict[str, Any], zero_stage: int) -> None:
    """What the hash of the configuration does not cover; ConfigError with both values."""
    before = read_run(source)
    same = {
        "data": "restore the files, or start a new run",
        "tokenizer": "restore the files, or start a new run",
        "global_batch": "use as many processes as before, or set `train_batch_size`",
    }
    if zero_stage:
        same["processes"] = "DeepSpeed's ZeRO resumes on the same number of processes only"
    for key, advice in same.items():
        if before.get(key, now[key]) != now[key]:
            raise ConfigError(
                f"{source}: this run has {key.replace('_', ' ')} {before[key]}, now it is "
                f"{now[key]}: {advice}"
            )
