"""Files that appear whole or not at all, and their hashes."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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
            streams: list[BinaryIO] = [stack.enter_context(open(path, "xb")) for path in temporary]
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


def clear_leftovers(*targets: Path) -> None:
    """Remove what killed `staged` calls left of ``targets``, whose folder the caller has locked."""
    for target in targets:
        for path in target.parent.glob(f".{glob.escape(target.name)}{PARTIAL}*"):
            path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other preparations and merges from ``folder``, which is made where it is missing.

    The lock goes with the process, leaving no file; a folder made here and left empty goes, too.
    A full disk is an OSError that names the folder and says what to do.
    """
    existed = folder.exists()
    handle = _lock(folder)
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = "the disk is full: free some space and repeat the command, or change --output"
        raise OSError(error.errno, what, str(error.filename or folder)) from error
    finally:
        if not existed:  # under the lock: the folder may be another's as soon as it is released
            with suppress(OSError):  # not empty: the result, or what can be continued
                folder.rmdir()
        os.close(handle)


def _lock(folder: Path) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # whoever made it removed it just now
            continue
        kept = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # removed by its owner: make it anew
                kept = os.path.samestat(os.fstat(handle), folder.stat())
            if kept:
                return handle
        except BlockingIOError as error:
            raise DataError(
                f"{folder}: another preparation is running here, or a merge; wait for it"
            ) from error
        except OSError as error:
            raise DataError(
                f"{folder} cannot be locked ({error.strerror}); prepare on a local disk and copy"
            ) from error
        finally:
            if not kept:
                os.close(handle)


def write_json(target: Path, content: dict[str, Any]) -> None:
    """Write ``content`` to ``target`` atomically, as indented UTF-8 JSON."""
    with staged(target) as (stream,):
        stream.write(json_bytes(content))


def json_bytes(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def printable(name: str) -> str:
    """A file's name as text; bytes in it that are not UTF-8 are spelt out (``\\udcff``)."""
    return name.encode("utf-8", "backslashreplace").decode()


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
