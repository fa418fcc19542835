"""Documents out of files. Nothing is skipped, repaired or substituted without being counted.

What is read is `data_prep.readers.READERS`, by ending: JSON lines and arrays, texts, lm_dataformat
archives, tar archives, parquet and arrow; files, folders of these, and globs. Damage, a cut or a
foreign file is a DataError that names file and member; a bad document is that, or is counted.

One loss cannot be seen in the bytes: a cut exactly between two zstd frames, two gzip members or
two lines of a plain file. The sha256 of each file, in `Reading.sources`, tells.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from data_prep.errors import DataError, UsageError
from data_prep.readers import READERS, reader_of
from data_prep.readers.base import (
    DOCUMENT_LIMIT,
    PILE_SETS,
    Document,
    Hashed,
    Reading,
    Source,
    check_pile_set,
    check_regular,
)
from data_prep.readers.folders import files_below, matching
from data_prep.readers.streams import decompressed, lines

__all__ = [
    "DOCUMENT_LIMIT",
    "PILE_SETS",
    "Document",
    "Reading",
    "check_pile_set",
    "decompressed",
    "expand",
    "lines",
    "read",
    "supported",
]


def supported() -> str:
    return ", ".join(READERS)


def expand(inputs: Iterable[str | Path]) -> list[Path]:
    """Files named by paths, folders (all the files below) and globs, sorted within each input.

    Hidden files are left out of folders. UsageError for a missing path, DataError for an ending
    that is not supported, a file named twice and what is no regular file or cannot be listed.
    """
    files: list[Path] = []
    for given in inputs:
        exact = os.path.exists(given)
        named = [Path(given)] if exact else matching(str(given))
        found = [file for path in named for file in _files_of(path)]
        if not found:
            raise UsageError(f"{given}: no such file, and no file matches")
        files += found
    for path in files:
        if reader_of(path.name) is None:
            raise DataError(f"{path}: unknown ending; supported are {supported()}")
    seen: dict[Path, Path] = {}
    for path in files:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            also = "" if str(first) == str(path) else f", also as {first}"
            raise UsageError(
                f"{path}: this input file is named twice{also}; its documents would be counted twice"
            )
    return files


def _files_of(path: Path) -> list[Path]:
    if os.path.isdir(path):
        return files_below(path)
    check_regular(path)  # now: opening a pipe would wait for ever
    return [path]


def read(
    files: Iterable[Path], reading: Reading, *, pile_set: str | None = None
) -> Iterator[Document]:
    """The documents of ``files`` in order, empty ones dropped and counted in ``reading``.

    ``pile_set`` as in `Reading`: of shards of the Pile, the documents of this set alone.
    """
    if pile_set is not None:
        check_pile_set(pile_set)
        reading.pile_set = pile_set
    return (document for path in files for document in _read_file(path, reading))


def _read_file(path: Path, reading: Reading) -> Iterator[Document]:
    reader = reader_of(path.name)
    assert reader is not None, "expand lets none pass"
    try:
        raw = Hashed(path, reading)
        try:
            for document in reader(Source(str(path), raw, path), reading):
                if document.text:
                    reading.documents += 1
                    yield document
                else:
                    reading.empty += 1
            reading.sources[str(path)] = raw.sha256()
        finally:
            raw.close()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
