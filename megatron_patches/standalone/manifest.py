"""`manifest.json` of a step: size and SHA-256 of every file, written last and checked before any is loaded.

A step without one (GPT-NeoX's, a released one, or older than this file) is read as before: with the
safe loader alone, which notices a truncated file, but not every changed bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_patches.training.untrusted import damaged

NAME = "manifest.json"
# A record takes 150 bytes, and the largest step has a few files a process.
MAX_BYTES = 64 << 20
BLOCK = 1 << 20

_SHA256 = re.compile(r"[0-9a-f]{64}")

Record = tuple[int, str]  # bytes, SHA-256


def record(file: Path, *, sync: bool = False) -> Record:
    """Size and hash of a file as it can be read back; with `sync`, after it is on the disk."""
    digest, size = hashlib.sha256(), 0
    with open(file, "rb", buffering=0) as stream:
        if sync:
            os.fsync(stream.fileno())
        while block := stream.read(BLOCK):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def check_sums(file: Path) -> None:
    """Compare what torch wrote with the sums that its writer took of it in memory.

    `record` hashes what is there. Whatever changed between the two would be certified by it.

    Raises ValueError with the file.
    """
    if not zipfile.is_zipfile(file) or damaged(file):
        raise ValueError(f"{file}: is not what was written: its checksums do not fit")


def files_of(folder: Path) -> list[Path]:
    """The files of a step that a manifest covers: all of them, sorted."""
    return sorted(f for f in folder.iterdir() if f.name != NAME and f.is_file())


def write(folder: Path, records: dict[str, Record], about: dict[str, Any]) -> None:
    """The manifest of `folder`, on the disk when this returns; `about` says what the step is."""
    files = {name: {"bytes": size, "sha256": sha} for name, (size, sha) in sorted(records.items())}
    text = json.dumps({**about, "files": files}, indent=1, sort_keys=True) + "\n"
    with open(folder / NAME, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: Path) -> dict[str, Record] | None:
    """File name -> what it must be; None where the step has no manifest.

    Raises ValueError for a manifest that is damaged or names files outside of the folder.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: damaged: larger than {MAX_BYTES} bytes")
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        found = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged ({type(error).__name__})") from error
    for name, (size, sha) in found.items():
        plain = name == os.path.basename(name) and name not in ("", ".", "..")
        whole = isinstance(size, int) and isinstance(sha, str) and _SHA256.fullmatch(sha)
        if not (plain and whole):
            raise ValueError(f"{path}: damaged: its entry {name[:60]!r} is no record of a file")
    return found


def faults(folder: Path, files: Iterable[str], records: dict[str, Record]) -> list[str]:
    """One line for each of `files` that is missing, or is not what the manifest says."""
    found = []
    for name in files:
        path, (size, sha) = folder / name, records[name]
        try:
            if not path.is_file():
                found.append(f"{path}: missing, though the manifest lists it")
            elif (there := path.stat().st_size) != size:
                found.append(f"{path}: damaged: {there} bytes, {size} were written")
            elif record(path)[1] != sha:
                found.append(f"{path}: damaged: its SHA-256 is not that of what was written")
        except OSError as error:
            found.append(f"{path}: cannot be read: {error}")
    return found


def check(folder: Path, names: Iterable[str]) -> list[str]:
    """The faults of `names`, of one process that reads a step alone; nothing without a manifest."""
    records = read(folder)
    if records is None:
        return []
    unlisted = [f"{folder / name}: not in the manifest" for name in names if name not in records]
    return unlisted + faults(folder, [name for name in names if name in records], records)
