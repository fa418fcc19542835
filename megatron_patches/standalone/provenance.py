"""Where numbers come from: the commit, the data, the tokenizer."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_patches.config import Config, ConfigError, config_sha
from megatron_patches.standalone.fingerprints import (
    data_fingerprint,
    git_sha,
    json_bytes,
    tokenizer_fingerprint,
    write_bytes,
    write_json,
    write_text,
)

MAX_BYTES = 1 << 20  # of run.json; the longest in use have two kilobytes


class RunRecordError(ValueError):
    """A `run.json` that is damaged."""


__all__ = [
    "RunRecordError",
    "check_same_run",
    "data_fingerprint",
    "git_sha",
    "json_bytes",
    "locked",
    "read_run",
    "tokenizer_fingerprint",
    "trained_sha",
    "write_bytes",
    "write_json",
    "write_text",
]


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
    """`run.json` of a run folder or of the one above a step folder; empty for foreign checkpoints.

    Raises ValueError, with the file, for one that is damaged.
    """
    for folder in (Path(path), Path(path).parent):
        file = folder / "run.json"
        if file.is_file():
            return _object(file)
    return {}


def _object(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"[:120]
        raise RunRecordError(f"{file}: damaged ({what}); restore it") from error
    return content


def trained_sha(path: str | Path, config: Config) -> str:
    """The hash of the configuration that a run was trained with; of `config` for a foreign one."""
    return str(read_run(path).get("config_sha", config_sha(config)))


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
