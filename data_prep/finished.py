"""The mark of a finished preparation, prepared.json: checking one, and putting one in place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.files import sha256_file, write_json
from data_prep.options import Options
from data_prep.splits import NAMES
from data_prep.tokenizing import TOKENIZER_FILES

MARK = "prepared.json"
_SUFFIXES = (".bin", ".json", ".idx")


def load(folder: Path) -> dict[str, Any] | None:
    """prepared.json of a folder, or None where there is none. DataError for another file."""
    path = folder / MARK
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        content["options_sha256"], content["splits"], content["inputs"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not readable ({error!r}); use --force to prepare anew"
        ) from error
    return content


def check(folder: Path, options: Options, files: list[Path]) -> dict[str, Any] | None:
    """The finished preparation of the same options and inputs, None if ``folder`` has none.

    DataError when it holds another one, files without the mark, or a damaged one.
    """
    found = load(folder)
    if found is None:
        there = [p for p in _outputs(folder) if p.exists()]
        if there:
            raise DataError(
                f"{folder} holds {there[0].name} without {MARK}: not a finished preparation; "
                "choose another --output, or --force to replace it"
            )
        return None
    if found["options_sha256"] != options.sha256():
        changed = difference(found.get("options", {}), options.record())
        raise DataError(
            f"{folder} was prepared with other options ({changed}); choose another --output, or "
            "--force to replace it"
        )
    if not same_inputs(found["inputs"], files):
        raise DataError(
            f"{folder} was prepared from other input files; choose another --output, or --force"
        )
    for name in found["splits"]:
        if not all((folder / f"{name}{suffix}").is_file() for suffix in _SUFFIXES):
            raise DataError(f"{folder}: a file of {name} is missing; prepare with --force")
    return found


def check_apart(folder: Path, files: list[Path]) -> None:
    """DataError when an input lies where the output will be replaced."""
    outputs = [path.resolve() for path in _outputs(folder)]
    for file in files:
        if any(file.resolve().is_relative_to(path) for path in outputs):
            raise DataError(
                f"{file} is an input and lies in the output {folder}: choose another --output"
            )


def describe_inputs(files: list[Path], sha256: Mapping[str, str]) -> list[dict[str, Any]]:
    """Name, size, time and hash of each input, to notice a changed one later."""
    return [
        {
            "name": path.name,
            "size": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sha256": sha256[str(path)],
        }
        for path in files
    ]


def publish(staging: Path, folder: Path, prepared: dict[str, Any]) -> None:
    """Move a complete ``staging`` into ``folder``: marks away first, new marks last."""
    for path in (folder / MARK, *(folder / f"{name}.idx" for name in NAMES)):
        path.unlink(missing_ok=True)
    for path in _outputs(folder):
        if path.is_dir():
            check_own_archive(path)
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    # From here on a kill must not cost the work: `complete` ends what it interrupted.
    write_json(staging / MARK, prepared)
    complete(staging, folder)


def complete(staging: Path, folder: Path) -> bool:
    """Move what `publish` has made ready; False where it had not come so far."""
    prepared = load(staging)
    if prepared is None:
        return False
    ready = [path for path in _outputs(staging) if path.exists()]
    for path in sorted(ready, key=lambda path: path.suffix == ".idx"):
        os.replace(path, folder / path.name)
    write_json(folder / MARK, prepared)
    return True


def check_own_archive(folder: Path) -> None:
    """DataError unless everything in ``folder`` is an archive of ours: it is about to be deleted."""
    for path in folder.iterdir():
        ours = path.name.startswith("data_") and path.name.endswith(".jsonl.zst")
        if not (path.is_file() and (ours or path.name == "current_chunk_incomplete")):
            raise DataError(
                f"{folder} holds {path.name}, which no preparation made: not deleted; choose another "
                "--output"
            )


def _outputs(folder: Path) -> list[Path]:
    names = [f"{name}{suffix}" for name in NAMES for suffix in _SUFFIXES]
    return [folder / name for name in ("documents", *TOKENIZER_FILES, *names)]


def same_inputs(recorded: list[dict[str, Any]], files: list[Path]) -> bool:
    """Whether ``files`` are those of `describe_inputs`, by name, size and time, else by hash."""
    if [entry["name"] for entry in recorded] != [path.name for path in files]:
        return False
    for entry, path in zip(recorded, files, strict=True):
        now = path.stat()
        if now.st_size != entry["size"]:
            return False
        # A copied file has a new time but the same bytes: then, and only then, hash it.
        if now.st_mtime_ns != entry["mtime_ns"] and sha256_file(path) != entry["sha256"]:
            return False
    return True


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """``key: before -> now`` of every option that differs."""
    keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    return ", ".join(f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys)
