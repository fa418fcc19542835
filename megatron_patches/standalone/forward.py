"""Compressed bytes as a file that goes forward only, which is all that a tar archive needs."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.errors import DataError
from data_prep.reading import decompressed

BLOCK = 1 << 20
TAR_BLOCK = 512
_ZSTD_BLOCK = 1 << 13  # one block may expand 32,000 times in a single call


def read_on(stream: Any, block: int = BLOCK) -> Iterator[bytes]:
    while data := stream.read(block):
        yield data


def expanded(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    """The bytes of `raw`, which `path` names, without the compression that its ending names."""
    ending = path.name.lower()
    if ending.endswith((".gz", ".tgz")):
        return read_on(gzip.GzipFile(fileobj=raw))
    if ending.endswith(".zst"):
        return decompressed(read_on(raw, _ZSTD_BLOCK), path)
    return read_on(raw)


class Forward:
    """Blocks as a file for tarfile; `check` is told how many bytes have come, and may raise."""

    def __init__(self, blocks: Iterator[bytes], path: Path, check: Callable[[int], None]) -> None:
        self._blocks, self._path, self._check = blocks, path, check
        self._held, self._position, self._produced = b"", 0, 0
        self.last = b""  # what the last `read` returned

    def _next(self) -> bytes:
        block = next(self._blocks, b"")
        self._produced += len(block)
        self._check(self._produced)
        return block

    def read(self, size: int) -> bytes:
        if size > BLOCK:  # members are read in blocks, so this is a header that claims to be huge
            raise DataError(f"{self._path}: refused, a tar header of {size} bytes")
        pieces = [self._held]
        length = len(self._held)
        while length < size and (block := self._next()):
            pieces.append(block)
            length += len(block)
        data = b"".join(pieces)
        self.last, self._held = data[:size], data[size:]
        self._position += len(self.last)
        return self.last

    def seek(self, position: int) -> None:
        if position < self._position:
            raise tarfile.ReadError("its members overlap")
        while self._position < position and self.read(min(position - self._position, BLOCK)):
            pass

    def tell(self) -> int:
        return self._position

    def drain(self) -> None:
        """To the very end, where gzip and zstd check what they gave."""
        while self._next():
            pass
