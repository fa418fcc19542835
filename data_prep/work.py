"""The hidden folder in which a preparation is built, and what an interrupted one leaves there.

Reading ends with ``read.json``; tokenizing leaves shards (see `shards`) and whole splits. A later
start with the same options, inputs and version goes on from there; another version begins anew,
other options or inputs only with ``--force``.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep import finished
from data_prep.errors import DataError
from data_prep.files import PARTIAL, write_json
from data_prep.indexed import IndexedDataset
from data_prep.options import Options
from data_prep.progress import Say
from data_prep.sums import Sums
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
        self, options: Options, files: list[Path], sums: Sums, force: bool, say: Say
    ) -> Spooled | None:
        """What can be continued, in a folder without anything else; None: begin anew.

        DataError, the work untouched, for a request that is not the one it was begun with (which
        may be a slip); with ``force`` such work is discarded.
        """
        spooled, reason = self._found(options, files, force)
        if spooled is not None:
            entries = zip(files, spooled.inputs, strict=True)
            sums.check({str(path): entry["sha256"] for path, entry in entries})
        for leftover in self.output.glob(f"{PARTIAL}*"):  # of killed runs: we hold the lock
            ours = leftover.is_dir() and not leftover.is_symlink()
            if ours and leftover != self.folder:
                shutil.rmtree(leftover)
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

    def _found(
        self, options: Options, files: list[Path], force: bool
    ) -> tuple[Spooled | None, str]:
        if not self.folder.is_dir():
            return None, ""
        try:
            content = json.loads((self.folder / _READ).read_bytes())
            spooled = Spooled(**content["spooled"])
            before = content["options"]
            same_version = content["version"] == version()
            same_options = before == options.record()
            changed = "" if same_options else finished.difference(before, options.record())
            finished.check_entries(spooled.inputs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None, "it had not read all its input"
        if not same_version:  # no request could continue it
            return None, "another version of data_prep began it"
        # Not in `try`: an input that cannot be read just now must not cost the work.
        if same_options and finished.same_inputs(spooled.inputs, files):
            return spooled, ""
        reason = "other or changed input files" if same_options else f"other options ({changed})"
        if not force:
            raise DataError(
                f"{self.folder} holds an interrupted preparation with {reason}; repeat its own "
                "command to continue it, choose another --output, or --force to discard it"
            )
        return None, reason
