"""Tokens on their way to a ``.bin``, in shards: what a kill leaves is the finished ones.

Three files beside ``prefix``: ``.tokens`` grows into the ``.bin``, ``.sizes`` holds the int32
sizes of its documents, ``.shards`` is the journal: a JSON line for every finished shard, written
after both others are on the disk. Opening checks each shard against its hash and cuts off what
came after the last good one; the running hash of the whole is made anew on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

SHARD_BYTES = 32 << 20  # of token ids: 60 to 80 MB of text under GPT-2's vocabulary
_SUFFIXES = (".tokens", ".sizes", ".shards")


class Shards:
    """Use inside ``with``. ``documents``: those on the disk already when it was opened, then all.

    ``digest``: sha256 over the tokens so far.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype[Any], say: Callable[[str], None]
    ) -> None:
        self._paths = [Path(f"{prefix}{suffix}") for suffix in _SUFFIXES]
        self._item = dtype.itemsize
        self.documents = 0
        self.digest = hashlib.sha256()
        tokens = self._recover()
        self._streams = [open(path, "ab") for path in self._paths]  # noqa: SIM115  closed by __exit__
        self._shard, self._pending = hashlib.sha256(), 0
        if self.documents:
            name = Path(prefix).name
            say(f"{name}: continues after {self.documents} documents, {tokens} tokens")

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()

    def add(self, ids_T: np.ndarray) -> None:
        """Append one document; a full shard is finished."""
        data = ids_T.tobytes()
        tokens, sizes, _ = self._streams
        tokens.write(data)
        sizes.write(np.int32(len(ids_T)).tobytes())
        self.digest.update(data)
        self._shard.update(data)
        self._pending += len(data)
        self.documents += 1
        if self._pending >= SHARD_BYTES:
            self.finish()

    def finish(self) -> None:
        """Put the documents since the last shard on the disk, then into the journal."""
        tokens, sizes, journal = self._streams
        _to_disk(tokens)
        _to_disk(sizes)
        entry = {
            "documents": self.documents,
            "bytes": tokens.tell(),
            "sha256": self._shard.hexdigest(),
        }
        journal.write(json.dumps(entry).encode() + b"\n")
        _to_disk(journal)
        self._shard, self._pending = hashlib.sha256(), 0

    def sizes(self) -> np.ndarray:
        """int32 [documents], mapped; only after `finish`."""
        if not self.documents:
            return np.zeros(0, "i4")
        return np.memmap(self._paths[1], dtype="i4", mode="r")

    def publish(self, target: Path) -> None:
        """The tokens become ``target``; the two other files go."""
        os.replace(self._paths[0], target)
        for path in self._paths[1:]:
            path.unlink()

    def _recover(self) -> int:
        """Check what is there, cut off the rest; tokens that are left."""
        tokens, sizes, journal = self._paths
        for path in self._paths:
            path.touch()
        good, kept = 0, b""
        with open(tokens, "rb") as stream:
            for line in _entries(journal.read_bytes()):
                entry = json.loads(line)
                shard = stream.read(entry["bytes"] - good)
                if hashlib.sha256(shard).hexdigest() != entry["sha256"]:
                    break
                self.digest.update(shard)
                good, self.documents = entry["bytes"], entry["documents"]
                kept += line + b"\n"
        if sizes.stat().st_size < 4 * self.documents or _total(sizes, self.documents) != (
            good // self._item
        ):
            # Only a disk that lost what it had confirmed gets here: begin from nothing.
            self.digest, self.documents, good, kept = hashlib.sha256(), 0, 0, b""
        os.truncate(tokens, good)
        os.truncate(sizes, 4 * self.documents)
        journal.write_bytes(kept)
        return good // self._item


def _entries(data: bytes) -> Iterator[bytes]:
    """Whole lines of the journal that are entries; a kill may have cut the last one."""
    for line in data.split(b"\n")[:-1]:
        try:
            entry = json.loads(line)
            entry["bytes"], entry["documents"], entry["sha256"]
        except (ValueError, KeyError, TypeError):
            return
        yield line


def _total(sizes: Path, documents: int) -> int:
    if not documents:
        return 0
    return int(np.memmap(sizes, dtype="i4", mode="r", shape=(documents,)).sum(dtype=np.int64))


def _to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
