"""Which ending is read how. To add a format: a function from a `Source` to documents, and a line.

A reader takes ``(source, reading)`` and yields documents, empty ones too. It raises `DataError`
(`Damaged` for bytes) with the source's name, and hands single bad documents to `Reading.refuse`.
"""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.errors import Damaged
from data_prep.readers.base import BadRecord, Document, Reader, Reading, Source
from data_prep.readers.columns import read_arrow, read_parquet
from data_prep.readers.records import read_dat, read_json, read_json_lines, read_text
from data_prep.readers.streams import decompressed, gunzipped
from data_prep.readers.tar import read_members


def _zstd(reader: Reader) -> Reader:
    return lambda source, reading: reader(source.through(decompressed), reading)


def _gzip(reader: Reader) -> Reader:
    return lambda source, reading: reader(source.through(gunzipped), reading)


def _tar(source: Source, reading: Reading) -> Iterator[Document]:
    """Members are read by their own endings; one without a known ending is a text."""
    return read_members(source, reading, _member)


def _tar_of_json_lines(source: Source, reading: Reading) -> Iterator[Document]:
    """OpenWebText2's own format: every member is .jsonl.zst, whatever it is called."""
    return read_members(source, reading, lambda s, _, r: _zstd(read_json_lines)(s, r))


def _member(source: Source, name: str, reading: Reading) -> Iterator[Document]:
    name = name.lower()
    reader = reader_of(name, _RECORDS)
    if reader is not None:
        yield from reader(source, reading)
    elif reader_of(name, _FILES_ONLY) is not None:
        reading.refuse(source.name, BadRecord("an archive", "cannot be read in a tar; unpack it"))
    else:
        yield from _text_member(source, name, reading)


def _text_member(source: Source, name: str, reading: Reading) -> Iterator[Document]:
    """One document, perhaps compressed: damage to it alone is one bad document."""
    ending = name[name.rfind(".") :]
    reader = {".gz": _gzip(read_text), ".zst": _zstd(read_text)}.get(ending, read_text)
    try:
        yield from list(reader(source, reading))
    except Damaged as error:
        if error.name != source.name:  # the archive around it
            raise
        what = str(error).removeprefix(f"{source.name}: ")
        reading.refuse(source.name, BadRecord("damaged member", what))


# Files of many records; the same inside a tar.
_RECORDS: dict[str, Reader] = {
    ".jsonl": read_json_lines,
    ".jsonl.zst": _zstd(read_json_lines),
    ".jsonl.gz": _gzip(read_json_lines),
    ".json": read_json,
    ".json.zst": _zstd(read_json),
    ".json.gz": _gzip(read_json),
    ".dat.zst": _zstd(read_dat),
}
_FILES_ONLY: dict[str, Reader] = {
    ".tar": _tar,
    ".tar.gz": _gzip(_tar),
    ".tgz": _gzip(_tar),
    ".tar.zst": _zstd(_tar),
    ".jsonl.zst.tar": _tar_of_json_lines,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
READERS: dict[str, Reader] = {
    **_RECORDS,
    ".txt": read_text,
    ".txt.gz": _gzip(read_text),
    ".txt.zst": _zstd(read_text),
    **_FILES_ONLY,
}


def reader_of(name: str, readers: dict[str, Reader] = READERS) -> Reader | None:
    """The reader of the longest ending that ``name`` has, in lower or upper case."""
    matching = [ending for ending in readers if name.lower().endswith(ending)]
    return readers[max(matching, key=len)] if matching else None
