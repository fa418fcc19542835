"""The sha256 of a large file of others, computed once for all processes and starts.

Files that we prepared have it in their sidecar. For others every process of every start would read
the whole ``.bin``; so the first one leaves a hidden stamp beside it, keyed by the file's size and
times, while the others wait for its lock. Where the folder cannot be written the stamp goes to the
folder that ``DATA_PREP_CACHE`` names; without one it stays in memory, and that is said.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_prep.files import sha256_file, write_json

CACHE = "DATA_PREP_CACHE"
WORTH_A_STAMP = 64 << 20  # less is hashed faster than a stamp is looked for on a shared disk


def stamped_sha256(path: Path) -> str:
    """sha256 of ``path``, from its stamp where that is still true."""
    if path.stat().st_size < WORTH_A_STAMP:
        return sha256_file(path)
    with _locked(path):
        key = _key(path)
        for stamp in _stamps(path):
            found = _read(stamp, key)
            if found is not None:
                return found
        sha256 = sha256_file(path)
        _leave(path, {"key": key, "sha256": sha256})
    return sha256


def _key(path: Path) -> list[int]:
    # The change time, too: a copy may keep the modification time of other content.
    now = path.stat()
    return [now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def _stamps(path: Path) -> list[Path]:
    """Where a stamp may lie: beside the file, then in the cache folder."""
    stamps = [path.with_name(f".{path.name}.sha256.json")]
    if folder := os.environ.get(CACHE):
        name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
        stamps.append(Path(folder) / f"{name}.sha256.json")
    return stamps


def _read(stamp: Path, key: list[int]) -> str | None:
    try:
        content = json.loads(stamp.read_bytes())
        return str(content["sha256"]) if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: hash anew


def _leave(path: Path, content: dict[str, object]) -> None:
    beside, *others = _stamps(path)
    for stamp in (beside, *others):
        try:
            write_json(stamp, content)
        except OSError:
            continue
        if stamp != beside:
            print(f"data_prep: {path.parent} is read-only; its hash is kept in {stamp}",
                  file=sys.stderr)  # fmt: skip
        return
    print(
        f"data_prep: the hash of {path} could not be kept, every start will read the whole file; "
        f"let {CACHE} name a folder that can be written",
        file=sys.stderr,
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for a process that is hashing the same file; where disks have no locks, do not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # no locks here: several hash at once, with the same outcome
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
