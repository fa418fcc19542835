"""What names a commit, a text and a tokenizer; and files written whole. Needs no configuration."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset
from megatron_patches.analysis.cuts import text_fingerprint


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
    return text_fingerprint([dataset.fingerprint for dataset in datasets], extra)


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


def write_bytes(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    write_bytes(path, text.encode())


def json_bytes(content: dict[str, Any]) -> bytes:
    """As `write_json` writes it."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_bytes(path, json_bytes(content))
