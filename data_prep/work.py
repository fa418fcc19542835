"""The hidden folder in which a preparation is built, and what an interrupted one leaves there.

Reading ends with ``read.json``; tokenizing leaves shards (see `shards`) and whole splits. A later
start with the same options, inputs and version goes on from there; any other begins anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep import finished
from data_prep.files import PARTIAL, write_json
from data_prep.indexed import IndexedDataset
from data_prep.options import Options
from data_prep.writing import version

_READ = "read.json"


@dataclass(frozen=True)
class Spooled:
    """What reading gave: kept documents and bytes by split, and what the sidecars say of it."""

    documents: dict[str, int]
    bytes: dict[str, int]
    sources: dict[str, Any]
    dropped: dict[str, int]
    inputs: list[dict[str, Any]]


class Work:
    """The folder ``output/.partial-work``, used under the lock on ``output``."""

    def __init__(self, output: Path) -> None:
        self.output, self.folder = output, output / f"{PARTIAL}work"

    def open(
        self, options: Options, files: list[Path], resumable: bool, say: Callable[[str], None]
    ) -> Spooled | None:
        """What can be continued, in a folder without anything else; None: begin anew."""
        for leftover in self.output.glob(f"{PARTIAL}*"):  # of killed runs: we hold the lock
            if leftover != self.folder:
                shutil.rmtree(leftover)
        spooled, reason = self._found(options, files) if resumable else (None, "")
        if spooled is None:
            if reason:
                say(f"an interrupted preparation is not continued: {reason}; starting anew")
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        else:
            say(f"continuing an interrupted preparation: {sum(spooled.documents.values())} "
                "documents were read")  # fmt: skip
        return spooled

    def keep_reading(self, options: Options, spooled: Spooled) -> None:
        """Mark the reading as finished."""
        content = {"options": options.record(), "version": version(), "spooled": asdict(spooled)}
        write_json(self.folder / _READ, content)

    def can_continue(self) -> bool:
        """Whether a later start has something to gain from what is here."""
        return (self.folder / _READ).is_file()

    def done(self, split: str) -> dict[str, Any] | None:
        """The summary of a split that an earlier run finished, its tokens verified."""
        prefix = self.folder / split
        if not all(Path(f"{prefix}{s}").is_file() for s in (".bin", ".json", ".idx")):
            return None
        data = IndexedDataset(prefix)
        data.verify()
        return data.sidecar

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _found(self, options: Options, files: list[Path]) -> tuple[Spooled | None, str]:
        if not self.folder.is_dir():
            return None, ""
        try:
            content = json.loads((self.folder / _READ).read_bytes())
            spooled = Spooled(**content["spooled"])
            before = content["options"]
            same_version = content["version"] == version()
        except (OSError, ValueError, KeyError, TypeError):
            return None, "it had not read all its input"
        if before != options.record():
            return None, f"other options ({finished.difference(before, options.record())})"
        if not same_version:
            return None, "another version of data_prep began it"
        if not finished.same_inputs(spooled.inputs, files):
            return None, "other or changed input files"
        return spooled, ""
