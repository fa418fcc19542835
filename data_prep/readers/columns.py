"""Columns of texts: .parquet, and the .arrow files of a Hugging Face data set on disk.

`datasets` is not needed, pyarrow is. Neither format has checksums of its own (a parquet page may
have one, and then it is checked), so a flipped bit inside a text may pass: compare the sha256.
Memory: one record batch of an arrow file, the pages at hand of a parquet file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.errors import Damaged, DataError
from data_prep.readers.base import Document, Reading, Source
from data_prep.readers.records import Rows
from data_prep.readers.streams import Exact

_ROWS = 256  # of a parquet file at once: pages are expanded as they are wanted
_ARROW_FILE = b"ARROW1\0\0"
_PARQUET_MAGIC = b"PAR1"
_FOOTER_START = 0x15  # its first field, a version, in Thrift's compact notation


def read_parquet(source: Source, reading: Reading) -> Iterator[Document]:
    """A row is a record; it is called by its number, the first one is 1."""
    pyarrow = _pyarrow(source.name)
    from pyarrow.parquet import ParquetFile

    if source.path is None:
        raise DataError(f"{source.name}: .parquet cannot be read inside an archive; unpack it")
    rows = Rows(source.name, reading)
    try:
        with ParquetFile(
            source.path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
        ) as file:
            columns = _columns(file.schema_arrow.names, source.name, reading)
            _check_single(source.path, source.name)
            batches = file.iter_batches(_ROWS, columns=columns, use_threads=False)
            count = 0
            for batch in _valid(batches, pyarrow, source.name):
                yield from _documents(batch, columns, count, rows, source.name, reading)
                count += batch.num_rows
            if count != file.metadata.num_rows:
                raise Damaged(source.name, f"{count} of {file.metadata.num_rows} rows; damaged")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(source.name, error) from error
    rows.finish()


def read_arrow(source: Source, reading: Reading) -> Iterator[Document]:
    """An IPC stream, as `datasets` writes it, or an IPC file, which is a stream in a frame.

    pyarrow takes a file cut between two batches for a whole one: here the end mark is wanted.
    """
    pyarrow = _pyarrow(source.name)
    from pyarrow import ipc

    file = _File(source.blocks)
    framed = file.begins_with(_ARROW_FILE)
    rows = Rows(source.name, reading)
    try:
        with ipc.open_stream(file) as stream:
            columns = _columns(stream.schema.names, source.name, reading)
            count = 0
            for batch in _valid(stream, pyarrow, source.name):
                yield from _documents(batch, columns, count, rows, source.name, reading)
                count += batch.num_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(source.name, error) from error
    if file.ran_out:
        raise Damaged(source.name, f"cut short after {count} rows, no end mark; get it anew")
    left, tail = file.rest()
    footer = int.from_bytes(tail[-10:-6], "little") + 10  # then its length and the magic
    if left != (footer if framed else 0) or (framed and tail[-6:] != _ARROW_FILE[:6]):
        raise Damaged(source.name, "its end is not that of one arrow file; get it anew")
    rows.finish()


def _documents(
    batch: Any, columns: list[str], before: int, rows: Rows, name: str, reading: Reading
) -> Iterator[Document]:
    values = [batch.column(batch.schema.get_field_index(column)).to_pylist() for column in columns]
    for number, row in enumerate(zip(*values, strict=True), before + 1):
        record: partial[dict[str, Any]] = partial(dict, zip(columns, row, strict=True))
        yield from rows.document(f"{name}:{number}", record)


def _valid(batches: Any, pyarrow: Any, name: str) -> Iterator[Any]:
    """Batches whose offsets and UTF-8 are right: reading others would leave the memory."""
    for batch in batches:
        batch.validate(full=True)
        yield batch


def _columns(names: list[str], name: str, reading: Reading) -> list[str]:
    if names.count(reading.text_key) != 1:
        raise DataError(
            f"{name}: no column {reading.text_key!r}; there are {', '.join(map(repr, names[:8]))} "
            "(choose one with --text-key)"
        )
    wanted = [reading.text_key]
    if reading.pile_set is not None and names.count("meta") == 1:
        wanted.append("meta")
    return wanted


def _check_single(path: Path, name: str) -> None:
    """Of parquet files joined end to end the library reads the last alone, without a word.

    Not by the offsets in the metadata: pyarrow ends the process when those are damaged. Where one
    file ends and the next begins, the first one's footer lies before, and its length.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = -1
        while (at := data.find(_PARQUET_MAGIC * 2, at + 1)) >= 0:
            start = at - 4 - int.from_bytes(data[max(at - 4, 0) : at], "little")
            if start >= 4 and data[start] == _FOOTER_START:
                raise Damaged(name, f"parquet files joined at byte {at}; give them one by one")


def _pyarrow(name: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{name}: reading it needs pyarrow, which is not installed: pip install pyarrow (the "
            "extra 'parquet' of this project)"
        ) from error
    return pyarrow


def _damaged(name: str, error: Exception) -> Damaged:
    first = str(error).split("\n")[0]
    return Damaged(name, f"damaged, cut short, or of another kind ({first}); get the file anew")


class _File:
    """Blocks as the file that pyarrow reads; ``ran_out`` when it wanted more than there was."""

    closed = False

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._data, self._pushed = Exact(blocks), b""
        self.ran_out = False

    def begins_with(self, magic: bytes) -> bool:
        """Whether it does; if so, the position is behind it."""
        head = self._data.take(len(magic))
        self._pushed = b"" if head == magic else head
        return head == magic

    def read(self, size: int) -> bytes:
        data, self._pushed = self._pushed[:size], self._pushed[size:]
        if len(data) < size:
            data += self._data.take(size - len(data))
        self.ran_out = self.ran_out or len(data) < size
        return data

    def rest(self) -> tuple[int, bytes]:
        """How many bytes are left, and the last of them; all are read."""
        left, tail = len(self._pushed), self._pushed
        while block := self._data.some(1 << 16):
            left, tail = left + len(block), (tail + block)[-16:]
        return left, tail

    def tell(self) -> int:
        return self._data.position - len(self._pushed)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
