"""The selected documents as an lm_dataformat archive: what is interchanged, and our own spool.

One folder of ``data_I_timeT_SPLIT.jsonl.zst``; a record has ``text`` and ``meta`` (split, origin).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.reading import Document, decompressed, lines
from data_prep.splits import NAMES

_COMMIT_BYTES = 1 << 30


class ArchiveWriter:
    """Add documents by split, inside ``with``; ``documents`` and ``bytes`` count them by split.

    A body that fails discards what was not yet committed.
    """

    def __init__(self, folder: Path) -> None:
        from lm_dataformat import Archive

        self.folder = folder
        # The library numbers the files of one object, keeps its open file under one fixed name,
        # and starts at 0 again for a folder that exists: so one scratch folder for each split,
        # one object for each folder, and the split in the file's name.
        self._parts = {name: folder.with_name(f"{folder.name}-{name}") for name in NAMES}
        self._archives = {name: _checked(Archive(str(part))) for name, part in self._parts.items()}
        self._pending = dict.fromkeys(NAMES, 0)
        self.documents = dict.fromkeys(NAMES, 0)
        self.bytes = dict.fromkeys(NAMES, 0)

    def add(self, split: str, document: Document) -> None:
        size = len(document.text.encode())
        self._archives[split].add_data(
            document.text, meta={"split": split, "origin": document.origin}
        )
        self.documents[split] += 1
        self.bytes[split] += size
        self._pending[split] += size
        if self._pending[split] >= _COMMIT_BYTES:
            self._commit(split)

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.folder.mkdir(exist_ok=True)
        for name, part in self._parts.items():
            if self._pending[name] and kind is None:
                self._commit(name)
            self._archives[name].fh.close()
            (part / "current_chunk_incomplete").unlink()
            for file in part.iterdir():
                os.replace(file, self.folder / file.name)
            part.rmdir()

    def _commit(self, split: str) -> None:
        self._archives[split].commit(split)
        self._pending[split] = 0


def _checked(archive: Any) -> Any:
    """The library writes frames without a checksum, and then a flipped bit may pass as text."""
    import zstandard

    archive.cctx = zstandard.ZstdCompressor(level=3, threads=8, write_checksum=True)
    archive.compressor = archive.cctx.stream_writer(archive.fh)
    return archive


def texts(folder: Path, split: str) -> Iterator[str]:
    """The texts of one split, in the order in which they were added."""
    files = sorted(folder.glob(f"data_*_{split}.jsonl.zst"), key=_number)
    for file in files:
        with open(file, "rb") as stream:
            for line in lines(decompressed(_blocks(stream), file), file):
                yield json.loads(line)["text"]


def _number(file: Path) -> int:
    return int(file.name.split("_")[1])


def _blocks(stream: object) -> Iterable[bytes]:
    return iter(lambda: stream.read(1 << 13), b"")  # type: ignore[attr-defined]
