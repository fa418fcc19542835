"""The ``.idx`` half of the format: where each sequence lies in ``.bin``. Used through `indexed`.

Little-endian, nothing aligned: 9 bytes magic, u64 version 1, u8 dtype code, u64 N sequences, u64 D,
then N i32 sizes in tokens, N i64 byte offsets into ``.bin``, D i64 document index (0, then the
sequence count after each document; D = documents + 1).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_prep.errors import DataError
from data_prep.files import staged

MAGIC = b"MMIDIDX\x00\x00"
SIZE_LIMIT = 2**31 - 1
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# 6 and 7 are floating point, in one order at NeoX and in the other at megatron-core.
_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHUNK = 1 << 20


def write_index(path: str | Path, sizes_N: Sequence[int] | np.ndarray, dtype: Any) -> None:
    """Write an ``.idx`` alone, one document per sequence, from sizes in tokens (no ``.bin``)."""
    sizes = np.asarray(sizes_N, dtype=np.int64)
    if len(sizes) and not 0 <= sizes.min() <= sizes.max() <= SIZE_LIMIT:
        raise DataError(f"{path}: sizes must lie between 0 and {SIZE_LIMIT} tokens")
    with staged(Path(path)) as (stream,):
        put_index(stream, sizes.astype("<i4"), np.dtype(dtype))


def put_index(
    stream: BinaryIO,
    sizes_N: np.ndarray,
    dtype: np.dtype[Any],
    document_index_D: np.ndarray | None = None,
) -> None:
    """Write the index of sizes int32 [N] to an open file, in chunks: flat memory.

    Without ``document_index_D`` every sequence is a document.
    """
    code = next((c for c, name in _CODES.items() if np.dtype(name) == dtype), None)
    if code is None:
        raise DataError(f"{dtype} is not a token type of the .idx format")
    count = len(sizes_N)
    documents = count + 1 if document_index_D is None else len(document_index_D)
    stream.write(_HEADER.pack(MAGIC, 1, code, count, documents))
    for start in range(0, count, _CHUNK):
        stream.write(sizes_N[start : start + _CHUNK].astype("<i4").tobytes())
    position = 0
    for start in range(0, count, _CHUNK):
        # A running sum in 32 bits is the classic fault of this format: offsets pass 2**31 bytes.
        bytes_N = sizes_N[start : start + _CHUNK].astype(np.int64) * dtype.itemsize
        ends_N = position + np.cumsum(bytes_N)
        stream.write((ends_N - bytes_N).astype("<i8").tobytes())
        position = int(ends_N[-1])
    for start in range(0, documents, _CHUNK):
        stop = min(start + _CHUNK, documents)
        chunk_D = (
            np.arange(start, stop) if document_index_D is None else document_index_D[start:stop]
        )
        stream.write(chunk_D.astype("<i8").tobytes())


@dataclass(frozen=True)
class Index:
    """The arrays of an ``.idx``: sizes int32 [N], pointers int64 [N], document_index int64 [D]."""

    dtype: np.dtype[Any]
    sizes: np.ndarray
    pointers: np.ndarray
    document_index: np.ndarray


def read_index(path: str | Path) -> Index:
    """Map and validate an ``.idx``. Raises DataError naming the file and the fault."""
    path = Path(path)
    with open(path, "rb") as stream:
        head = stream.read(_HEADER.size)
        length = stream.seek(0, 2)
    if head.startswith(_OLD_MAGIC):
        raise DataError(
            f"{path} is in the old lazy/cached format (TNTIDX); prepare the data again as mmap"
        )
    if not head.startswith(MAGIC):
        raise DataError(f"{path} is not a Megatron .idx file (its first bytes are {head[:9]!r})")
    if len(head) < _HEADER.size:
        raise DataError(f"{path} is cut short: {length} bytes do not hold the header; make it anew")
    _, version, code, count, documents = _HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{path} has format version {version}; only version 1 is known")
    if code not in _CODES:
        kind = "floating-point numbers, not token ids" if code in (6, 7) else "an unknown type"
        raise DataError(f"{path} has dtype code {code}: {kind}")
    expected = _HEADER.size + 12 * count + 8 * documents
    if length == expected + count and count:
        raise DataError(f"{path} carries megatron-core's multimodal modes, which are not supported")
    if length != expected:
        raise DataError(
            f"{path} has {length} bytes, but {count} sequences and a document index of "
            f"{documents} need {expected}: cut short or damaged; make it anew"
        )
    if not count:
        raise DataError(f"{path} lists no documents; prepare the data again")
    raw = np.memmap(path, mode="r")
    at = np.cumsum([_HEADER.size, 4 * count, 8 * count])
    index = Index(
        dtype=np.dtype(_CODES[code]),
        sizes=raw[at[0] : at[1]].view("<i4"),
        pointers=raw[at[1] : at[2]].view("<i8"),
        document_index=raw[at[2] :].view("<i8"),
    )
    _check_arrays(path, index)
    return index


def _check_arrays(path: Path, index: Index) -> None:
    """Pointers must be the exclusive running sum of sizes; the document index must cover all."""
    position = 0
    for start in range(0, len(index.sizes), _CHUNK):  # in chunks: flat memory for huge files
        sizes = index.sizes[start : start + _CHUNK].astype(np.int64) * index.dtype.itemsize
        if sizes.min() < 0:
            raise DataError(f"{path} lists a negative size; the file is damaged, make it anew")
        ends = position + np.cumsum(sizes)
        wrong = np.flatnonzero(index.pointers[start : start + _CHUNK] != ends - sizes)
        if wrong.size:
            raise DataError(
                f"{path}: the offset of sequence {start + wrong[0]} does not follow from the sizes "
                "(a 32-bit overflow or a damaged file); make it anew"
            )
        position = int(ends[-1])
    documents = index.document_index
    if len(documents) < 2:
        raise DataError(
            f"{path} has sequences but no documents, as NeoX's merge tool leaves it; prepare anew"
        )
    falling = any(
        np.any(np.diff(documents[start : start + _CHUNK + 1]) < 0)
        for start in range(0, len(documents), _CHUNK)
    )
    if documents[0] != 0 or documents[-1] != len(index.sizes) or falling:
        raise DataError(f"{path}: the document index does not cover the sequences; make it anew")
