"""Files that appear whole or not at all, and their hashes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.errors import DataError

PARTIAL = ".partial-"
_BLOCK = 1 << 20


@contextmanager
def staged(*targets: Path) -> Iterator[list[BinaryIO]]:
    """Open one temporary file per target, in the target's own folder, for binary writing.

    When the body succeeds they are synced to disk and renamed in the given order; the last target
    is the mark of completeness, so an old one is removed before anything else is replaced. When the
    body fails, the temporary files are removed and the targets are as they were. After a kill the
    leftovers are hidden files with ``.partial-`` in their names, which no reader looks at.
    """
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: that makes files only their owner can read, wrong on a cluster's shared disk.
    stamp = f"{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
    temporary = [target.with_name(f".{target.name}{stamp}") for target in targets]
    try:
        with ExitStack() as stack:
            streams = [stack.enter_context(open(path, "xb")) for path in temporary]
            yield streams
            for stream in streams:
                stream.flush()
                os.fsync(stream.fileno())
        if len(targets) > 1:
            targets[-1].unlink(missing_ok=True)
        for path, target in zip(temporary, targets, strict=True):
            os.replace(path, target)
        for folder in {target.parent for target in targets}:
            _sync_folder(folder)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other preparations of ``folder``; the lock goes with the process, leaving no file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{folder}: another preparation is running here; wait for it"
            ) from error
        except OSError as error:
            raise DataError(
                f"{folder} cannot be locked ({error.strerror}); prepare on a local disk and copy"
            ) from error
        yield
    finally:
        os.close(handle)


def write_json(target: Path, content: dict[str, Any]) -> None:
    """Write ``content`` to ``target`` atomically, as indented UTF-8 JSON."""
    with staged(target) as (stream,):
        stream.write(json_bytes(content))


def json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256_file(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """Hexadecimal sha256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the renames themselves survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
