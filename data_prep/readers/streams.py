"""Bytes on their way from a file: decompression that sees a cut, lines, whole texts.

Memory is flat: what one block expands to, and one document. A zstd frame may ask for a window of
2 GiB besides, the largest that `zstd --long=31` writes.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.errors import Damaged, DataError
from data_prep.readers.base import DOCUMENT_LIMIT, BadRecord, kind_of

# What is given to a decompressor at once. zstd can expand 32,000 times: 256 MiB at most.
_PIECE = 1 << 13
_WINDOW = 2**31
# How a file of each kind begins; of zstd, what pzstd and others write before the first frame as well.
_BEGINNINGS = {
    "gzip": (b"\x1f\x8b",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))),
}
# No archive of text shrinks 5,000 times over 4 GiB (prose shrinks 3 to 5 times, source code 10):
# such a stream is a bomb. Below 4 GiB nothing is refused: one repeated line may shrink that much.
BOMB_BYTES = 1 << 32
BOMB_RATIO = 5000


def decompressed(blocks: Iterable[bytes], name: str | Path) -> Iterator[bytes]:
    """zstd frame after frame. The library's own reader takes a cut frame for the end."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)

    def start() -> Any:
        return decompressor.decompressobj()

    yield from _frames(blocks, str(name), "zstd", start, zstandard.ZstdError)


def gunzipped(blocks: Iterable[bytes], name: str | Path) -> Iterator[bytes]:
    """gzip member after member, each with its length and checksum; zeros may pad the end."""
    yield from _frames(blocks, str(name), "gzip", lambda: zlib.decompressobj(31), zlib.error)


def _frames(
    blocks: Iterable[bytes],
    name: str,
    kind: str,
    start: Callable[[], Any],
    failure: type[Exception],
) -> Iterator[bytes]:
    """Each frame to its very end; what follows one is the next, and a rest is an error."""
    frame, complete, position, produced = None, 0, 0, 0
    for block in blocks:
        _check_kind(block, name, kind, position)
        for first in range(0, len(block), _PIECE):
            piece = block[first : first + _PIECE]
            position += len(piece)
            while piece:
                if frame is None and complete and kind == "gzip":
                    piece = piece.lstrip(b"\0")  # padding to a block, as tapes had it
                    if not piece:
                        break
                frame = frame or start()
                try:
                    data = frame.decompress(piece)
                except failure as error:
                    raise Damaged(
                        name,
                        f"damaged {kind} data near byte {position} ({error}); get the file anew",
                    ) from error
                produced += len(data)
                if produced > max(BOMB_BYTES, BOMB_RATIO * position):
                    raise Damaged(
                        name,
                        f"refused, {position} bytes expand to {produced} and more; this is no "
                        "archive of text",
                    )
                if data:
                    yield data
                piece = frame.unused_data if frame.eof else b""
                complete, frame = (complete + 1, None) if frame.eof else (complete, frame)
    if frame is not None or not complete:
        where = f"the data end inside a {kind} frame at byte {position}"
        raise Damaged(name, f"cut short, {where if position else 'it has no bytes'}; get it anew")


def _check_kind(block: bytes, name: str, kind: str, position: int) -> None:
    if position or any(block.startswith(begin[: len(block)]) for begin in _BEGINNINGS[kind]):
        return
    found = kind_of(block)
    if found is not None:
        raise Damaged(name, f"damaged {kind} data, in fact it is {found}; rename it")
    raise Damaged(
        name,
        f"damaged {kind} data, or none at all: it begins with {block[:8]!r}; rename it if it was "
        "never compressed, else get it anew",
    )


def lines(blocks: Iterable[bytes], name: str | Path) -> Iterator[bytes]:
    """Lines without their ends; linear in the length of a line, which may pass many blocks."""
    pieces: list[bytes] = []
    length = 0
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join([*pieces, line]) if length else line
            pieces, length = [], 0
        if rest:
            pieces.append(rest)
            length += len(rest)
        if length > DOCUMENT_LIMIT:
            raise DataError(
                f"{name}: a line of more than {DOCUMENT_LIMIT} bytes; is this JSON lines?"
            )
    if length:
        yield b"".join(pieces)


def whole(blocks: Iterable[bytes]) -> bytes:
    """All of a text. BadRecord for one of more than `DOCUMENT_LIMIT` bytes."""
    pieces, length = [], 0
    for block in blocks:
        pieces.append(block)
        length += len(block)
        if length > DOCUMENT_LIMIT:
            raise BadRecord("too long", f"a text of more than {DOCUMENT_LIMIT} bytes; cut it up")
    return b"".join(pieces)


def first_of(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first block that is not empty, and all of them again."""
    head = next((block for block in blocks if block), b"")
    return head, itertools.chain([head] if head else [], blocks)


class Exact:
    """Blocks as a file read in exact amounts; ``position`` counts what was taken."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._held, self._start = b"", 0
        self.position = 0

    def some(self, most: int) -> bytes:
        """Between 1 and ``most`` bytes, b"" at the end."""
        while self._start >= len(self._held):
            block = next(self._blocks, None)
            if block is None:
                return b""
            self._held, self._start = block, 0
        data = self._held[self._start : self._start + most]
        self._start += len(data)
        self.position += len(data)
        return data

    def take(self, size: int) -> bytes:
        """``size`` bytes, fewer at the end alone."""
        data = self.some(size)
        if len(data) == size:
            return data
        pieces = [data]
        size -= len(data)
        while size and (data := self.some(size)):
            pieces.append(data)
            size -= len(data)
        return b"".join(pieces)
