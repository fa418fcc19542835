"""Documents out of files. Nothing is skipped, repaired or substituted without being counted.

Supported: ``.jsonl``, ``.jsonl.zst`` (any number of frames), ``.txt`` (a file is a document),
folders of these (lm_dataformat archives included) and globs. To add a format, write a function
from an open file to documents and name its ending in `_READERS`.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.errors import DataError, UsageError

_BLOCK = 1 << 16
# zstd can expand 32,000 times: a small input block bounds what one call may return (256 MiB).
_ZSTD_BLOCK = 1 << 13
LINE_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it came from (``file.jsonl:17``)."""

    text: str
    origin: str


@dataclass
class Reading:
    """Options of a reading and, while it runs, its counts.

    ``on_bad_line``: ``stop`` raises at the first bad record, ``skip`` counts it. ``sources`` maps
    each file read to the end to its sha256; ``input_bytes`` is the progress through the files.
    """

    text_key: str = "text"
    on_bad_line: str = "stop"
    documents: int = 0
    empty: int = 0
    bad: int = 0
    blank_lines: int = 0
    first_bad: str | None = None
    input_bytes: int = 0
    sources: dict[str, str] = field(default_factory=dict)

    def refuse(self, where: str, what: str) -> None:
        if self.on_bad_line == "stop":
            raise DataError(
                f"{where}: {what}; correct it, or count and skip with --on-bad-line skip"
            )
        self.bad += 1
        self.first_bad = self.first_bad or f"{where}: {what}"


def supported() -> str:
    return ", ".join(_READERS)


def expand(inputs: Iterable[str | Path]) -> list[Path]:
    """Files named by paths, folders (all the files below) and globs, sorted within each input.

    Hidden files are left out of folders. UsageError for a missing path, DataError for an ending
    that is not supported and for a file named twice.
    """
    files: list[Path] = []
    for given in inputs:
        exact = Path(given).exists()
        matching = (
            [Path(given)] if exact else sorted(map(Path, glob.glob(str(given), recursive=True)))
        )
        found = [file for path in matching for file in (_below(path) if path.is_dir() else [path])]
        if not found:
            raise UsageError(f"{given}: no such file, and no file matches")
        files += found
    for path in files:
        if _reader_of(path) is None:
            raise DataError(f"{path}: unknown ending; supported are {supported()}")
    if len({path.resolve() for path in files}) != len(files):
        raise UsageError("an input file is named twice; its documents would be counted twice")
    return files


def read(files: Iterable[Path], reading: Reading) -> Iterator[Document]:
    """The documents of ``files`` in order, empty ones dropped and counted in ``reading``."""
    for path in files:
        reader = _reader_of(path)
        assert reader is not None
        try:
            with open(path, "rb") as raw:
                stream = _Hashing(raw, reading)
                for document in reader(stream, path, reading):
                    if document.text:
                        reading.documents += 1
                        yield document
                    else:
                        reading.empty += 1
                reading.sources[str(path)] = stream.digest.hexdigest()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error


class _Hashing:
    """Blocks of a file, hashed and counted on their way."""

    def __init__(self, raw: BinaryIO, reading: Reading) -> None:
        self._raw, self._reading = raw, reading
        self.digest = hashlib.sha256()

    def blocks(self, size: int = _BLOCK) -> Iterator[bytes]:
        while block := self._raw.read(size):
            self.digest.update(block)
            self._reading.input_bytes += len(block)
            yield block


def _read_jsonl(stream: _Hashing, path: Path, reading: Reading) -> Iterator[Document]:
    yield from _records(lines(stream.blocks(), path), path, reading)


def _read_jsonl_zst(stream: _Hashing, path: Path, reading: Reading) -> Iterator[Document]:
    blocks = decompressed(stream.blocks(_ZSTD_BLOCK), path)
    yield from _records(lines(blocks, path), path, reading)


def _read_txt(stream: _Hashing, path: Path, reading: Reading) -> Iterator[Document]:
    data = b"".join(stream.blocks())
    try:
        text = _decode(data.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        reading.refuse(str(path), str(error))
    else:
        yield Document(text, str(path))


_READERS: dict[str, Callable[[_Hashing, Path, Reading], Iterator[Document]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.zst": _read_jsonl_zst,
    ".txt": _read_txt,
}


def _reader_of(path: Path) -> Callable[..., Iterator[Document]] | None:
    matching = [ending for ending in _READERS if path.name.endswith(ending)]
    return _READERS[max(matching, key=len)] if matching else None


def decompressed(blocks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Decompress frame after frame. The library's own reader takes a cut frame for the end."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame, seen, position = None, False, 0
    for block in blocks:
        position += len(block)
        while block:
            frame = frame or decompressor.decompressobj()
            try:
                data = frame.decompress(block)
            except zstandard.ZstdError as error:
                raise DataError(
                    f"{path}: damaged zstd data near byte {position} ({error}); get the file anew"
                ) from error
            seen = True
            if data:
                yield data
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None or not seen:
        raise DataError(
            f"{path}: cut short, the data end inside a zstd frame at byte {position}; "
            "get the file anew"
        )


def lines(blocks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Lines without their ends; linear in the length of a line, which may pass many blocks."""
    pieces: list[bytes] = []
    length = 0
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join([*pieces, line])
            pieces, length = [], 0
        pieces.append(rest)
        length += len(rest)
        if length > LINE_LIMIT:
            raise DataError(f"{path}: a line of more than {LINE_LIMIT} bytes; is this JSON lines?")
    if length:
        yield b"".join(pieces)


def _records(lines: Iterable[bytes], path: Path, reading: Reading) -> Iterator[Document]:
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            reading.blank_lines += 1
            continue
        try:
            text = _text_of(_parse(_decode(line)), reading.text_key)
        except ValueError as error:
            reading.refuse(where, str(error))
        else:
            yield Document(text, where)


def _decode(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("is UTF-16; convert it to UTF-8")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} (0x{data[error.start]:02x})") from None


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:
        hint = " (indented JSON or an array? one object per line is wanted)"
        raise ValueError(f"not JSON: {error}{hint if len(line) < 3 else ''}") from None


def _text_of(record: Any, key: str) -> str:
    """The text of a record: a string, paragraphs joined by a blank line, or a bare string."""
    if isinstance(record, str):
        text = record
    elif not isinstance(record, dict):
        raise ValueError(f"a JSON object is wanted, not {type(record).__name__}")
    elif key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ValueError(f"no key {key!r}; there are {keys} (choose one with --text-key)")
    else:
        text = record[key]
        if isinstance(text, list) and all(isinstance(part, str) for part in text):
            text = "\n\n".join(text)
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is {json.dumps(text)[:40]}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} is a lone surrogate, which UTF-8 cannot hold"
        ) from None
    return text


def _below(folder: Path) -> list[Path]:
    # rglob does not look behind links to folders, and what lies there must not go missing.
    links = [path for path in folder.rglob("*") if path.is_symlink() and path.is_dir()]
    if links:
        raise DataError(
            f"{links[0]} is a link to a folder: give that folder as an --input of its own"
        )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [p for p in files if not any(n.startswith(".") for n in p.relative_to(folder).parts)]
    # lm_dataformat leaves this file in every archive, empty; with content it is a crash.
    return [p for p in files if p.name != "current_chunk_incomplete" or _refuse_chunk(p)]


def _refuse_chunk(path: Path) -> bool:
    if path.stat().st_size:
        raise DataError(
            f"{path}: an lm_dataformat archive that was never committed; finish it first"
        )
    return False
