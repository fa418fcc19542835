"""The mark of a finished preparation, prepared.json: checking one, and putting one in place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.files import printable, sha256_file, write_json
from data_prep.indexed import IndexedDataset
from data_prep.options import Options
from data_prep.splits import NAMES
from data_prep.tokenizer import TOKENIZER_FILES

MARK = "prepared.json"
_SUFFIXES = (".bin", ".json", ".idx")
_HASHED = 1 << 30  # bytes of a .bin that are read again (a second) before it is called finished


def load(folder: Path) -> dict[str, Any] | None:
    """prepared.json of a folder, or None where there is none. DataError for another file."""
    path = folder / MARK
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        content["options_sha256"]
        check_entries(content["inputs"])
        for split in content["splits"].values():
            _ = [split[key] for key in ("documents", "tokens", "text_bytes", "fingerprint")]
        _ = [content["tokenizer"][key] for key in ("type", "fingerprint", "vocab_size")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not readable ({repr(error)[:120]}); use --force to prepare anew"
        ) from error
    return dict(content)


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
        _check_split(folder / name, found["splits"][name]["fingerprint"])
    _check_tokenizer(folder, found["tokenizer"]["fingerprint"])
    return found


def _check_split(prefix: Path, fingerprint: str) -> None:
    """The files fit each other and the mark; a ``.bin`` of up to a gibibyte is hashed as well."""
    try:
        data = IndexedDataset(prefix)
        if data.fingerprint != fingerprint:
            raise DataError(f"{prefix} is {data.fingerprint}, not the {fingerprint} of {MARK}")
        if data.tokens.nbytes <= _HASHED:
            data.verify()
    except DataError as error:
        raise DataError(f"{error} (--force replaces what is there)") from error


def _check_tokenizer(folder: Path, fingerprint: str) -> None:
    there = [path for name in TOKENIZER_FILES if (path := folder / name).is_file()]
    if not there:
        raise DataError(f"{folder}: {TOKENIZER_FILES[0]} is missing; prepare with --force")
    found = hashlib.sha256(there[0].read_bytes()).hexdigest()[:16]
    if found != fingerprint:
        raise DataError(
            f"{there[0]} is {found}, not the tokenizer {fingerprint} of the data; prepare with "
            "--force"
        )


def check_apart(folder: Path, files: list[Path]) -> None:
    """DataError when an input lies where the output will be replaced."""
    replaced = [path.resolve() for path in _outputs(folder)]
    for file in files:
        if any(file.resolve().is_relative_to(path) for path in replaced):
            raise DataError(
                f"{file} is an input and lies in the output {folder}: choose another --output"
            )


def describe_inputs(
    files: list[Path], sha256: Mapping[str, str], opened: Mapping[Path, os.stat_result]
) -> list[dict[str, Any]]:
    """Name, size, time and hash of each input, to notice a changed one later.

    Size and time are those before it was read (``opened``); DataError if they no longer hold.
    """
    for path in files:
        check_unchanged(path, opened[path])
    return [
        {
            "name": printable(path.name),
            "size": opened[path].st_size,
            "mtime_ns": opened[path].st_mtime_ns,
            "sha256": sha256[str(path)],
        }
        for path in files
    ]


def check_unchanged(path: Path, before: os.stat_result) -> None:
    """DataError where a file was written to since ``before``."""
    now = path.stat()
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise DataError(
            f"{path} was changed while the input was read; start again when it is complete"
        )


def publish(staging: Path, folder: Path, prepared: dict[str, Any]) -> None:
    """Move a complete ``staging`` into ``folder``: marks away first, new marks last."""
    check_replaceable(folder)
    for path in (folder / MARK, *(folder / f"{name}.idx" for name in NAMES)):
        path.unlink(missing_ok=True)
    for path in _outputs(folder):
        if path.is_dir():
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


def check_replaceable(folder: Path) -> None:
    """DataError unless everything that `publish` would replace can be, before it begins."""
    for path in outputs(folder):
        if not path.is_dir():
            continue
        if path.is_symlink() or path.name != "documents":
            what = "a link to a folder" if path.is_symlink() else "a folder"
            raise DataError(f"{path} is {what}: not deleted; move it, or choose another --output")
        check_own_archive(path)


def check_own_archive(folder: Path) -> None:
    """DataError unless everything in ``folder`` is an archive of ours: it is about to be deleted."""
    for path in folder.iterdir():
        ours = path.name.startswith("data_") and path.name.endswith(".jsonl.zst")
        if not (path.is_file() and (ours or path.name == "current_chunk_incomplete")):
            raise DataError(
                f"{folder} holds {path.name}, which no preparation made: not deleted; choose another "
                "--output"
            )


def outputs(folder: Path) -> list[Path]:
    """Everything that a preparation may put there, its mark included."""
    return [*_outputs(folder), folder / MARK]


def _outputs(folder: Path) -> list[Path]:
    names = [f"{name}{suffix}" for name in NAMES for suffix in _SUFFIXES]
    return [folder / name for name in ("documents", *TOKENIZER_FILES, *names)]


def check_entries(recorded: list[dict[str, Any]]) -> None:
    """KeyError or TypeError unless they are what `describe_inputs` makes."""
    for entry in recorded:
        _ = [entry[key] for key in ("name", "size", "mtime_ns", "sha256")]


def same_inputs(recorded: list[dict[str, Any]], files: list[Path]) -> bool:
    """Whether ``files`` are those of `describe_inputs`, by name, size and time, else by hash."""
    if [entry["name"] for entry in recorded] != [printable(path.name) for path in files]:
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
