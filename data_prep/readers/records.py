"""Documents out of text and JSON: one text, JSON lines, a JSON array, lm_dataformat's .dat."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from data_prep.errors import DataError
from data_prep.readers.base import (
    DOCUMENT_LIMIT,
    BadRecord,
    Document,
    Reading,
    Source,
    kind_of,
)
from data_prep.readers.json_array import array_elements
from data_prep.readers.streams import Exact, first_of, lines, whole

_DAT_PREFIX = 16


def read_text(source: Source, reading: Reading) -> Iterator[Document]:
    """The whole file as one document."""
    no_filter(source.name, reading)
    try:
        text = plain_text(whole(source.blocks))
    except BadRecord as bad:
        reading.refuse(source.name, bad)
    else:
        yield Document(text, source.name)


def plain_text(data: bytes) -> str:
    """UTF-8 without a mark at its start; BadRecord for what is no text."""
    if kind_of(data[:8]) == "PDF":  # the few without a byte that betrays them
        raise BadRecord("binary", "a PDF, not text")
    text = decode(data.removeprefix(codecs.BOM_UTF8))
    if (position := text.find("\0")) >= 0:
        raise BadRecord("binary", f"a NUL at character {position}: not text")
    return text


def read_json_lines(source: Source, reading: Reading) -> Iterator[Document]:
    """One record a line. A file none of whose lines is one is an error, not so many bad lines."""
    head, blocks = first_of(source.blocks)
    _check_head(head, source.name)
    rows = Rows(source.name, reading)
    for number, line in enumerate(lines(blocks, source.name), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            reading.blank_lines += 1
            continue
        where = f"{source.name}:{number}"
        yield from rows.document(where, partial(_parsed, line, reading.text_key))
    rows.finish()


def read_json(source: Source, reading: Reading) -> Iterator[Document]:
    """JSON lines, or what lm_dataformat's JSONArchive writes: one array of texts (or records)."""
    head, blocks = first_of(source.blocks)
    if not head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from read_json_lines(Source(source.name, blocks), reading)
        return
    rows = Rows(source.name, reading)
    once = partial(_key_once, reading.text_key)
    for number, record in enumerate(array_elements(blocks, source.name, once), 1):
        where = f"{source.name}[{number}]"
        yield from rows.document(where, partial(_itself, record))
    rows.finish()


def _itself(record: Any) -> Any:
    return record


def read_dat(source: Source, reading: Reading) -> Iterator[Document]:
    """lm_dataformat's DatArchive: 16 decimal digits, then as many bytes of text, and again."""
    no_filter(source.name, reading)
    data = Exact(source.blocks)
    number = 0
    while prefix := data.take(_DAT_PREFIX):
        number += 1
        where = f"{source.name}, document {number}"
        at = f"byte {data.position - len(prefix)} of the expanded data"
        if len(prefix) < _DAT_PREFIX:
            raise DataError(f"{where}: cut short at {at}; get the file anew")
        if not prefix.isdigit():
            raise DataError(f"{where}: no length of 16 digits at {at}; damaged, or no .dat archive")
        size = int(prefix)
        if size > DOCUMENT_LIMIT:
            raise DataError(f"{where}: claims {size} bytes at {at}; {DOCUMENT_LIMIT} at most")
        content = data.take(size)
        if len(content) < size:
            raise DataError(
                f"{where}: cut short, {len(content)} of {size} bytes; get the file anew"
            )
        try:
            text = decode(content)
        except BadRecord as bad:
            reading.refuse(where, bad)
        else:
            yield Document(text, where)


class Rows:
    """The records of one file: their texts, the Pile filter, and whether any was of use."""

    def __init__(self, name: str, reading: Reading) -> None:
        self._name, self._reading = name, reading
        self._good = self._bad = 0
        self._first_bad = ""

    def text_of(self, record: Any) -> str | None:
        """The text of a record, None for one of another Pile set. BadRecord, DataError."""
        if self._reading.pile_set is not None and not self._chosen(record):
            self._good += 1
            self._reading.other_sets += 1
            return None
        text = text_of(record, self._reading.text_key)
        self._good += 1
        return text

    def document(self, where: str, record: Callable[[], Any]) -> Iterator[Document]:
        """The document of one record; none where it is filtered out, or bad and counted."""
        try:
            text = self.text_of(record())
        except BadRecord as bad:
            self.refuse(where, bad)
        else:
            if text is not None:
                yield Document(text, where)

    def refuse(self, where: str, bad: BadRecord) -> None:
        self._bad += 1
        self._first_bad = self._first_bad or f"{where}: {bad}"
        self._reading.refuse(where, bad)

    def finish(self) -> None:
        """At the end of the file. Nothing but bad records: a foreign file, or a wrong key."""
        if self._bad and not self._good:
            raise DataError(
                f"{self._name}: none of its {self._bad} records is usable "
                f"({self._first_bad}); is it the right file, and the right --text-key?"
            )

    def _chosen(self, record: Any) -> bool:
        meta = record.get("meta") if isinstance(record, dict) else None
        name = meta.get("pile_set_name") if isinstance(meta, dict) else None
        if isinstance(name, str):
            return name == self._reading.pile_set
        if not self._good:  # the first record: the file is of another kind
            no_filter(self._name, self._reading)
        raise BadRecord("no meta.pile_set_name", "no meta.pile_set_name, which --pile-set needs")


def no_filter(name: str, reading: Reading) -> None:
    """DataError when a Pile set is to be kept of a file that does not say which is which."""
    if reading.pile_set is not None:
        raise DataError(
            f"{name}: its documents have no meta.pile_set_name, so it cannot be filtered; "
            "give a shard of the Pile, or leave out --pile-set"
        )


def text_of(record: Any, key: str) -> str:
    """The text of a record: a string, paragraphs joined by a blank line, or a bare string."""
    if isinstance(record, str):
        text = record
    elif not isinstance(record, dict):
        raise BadRecord("no object", f"a JSON object is wanted, not {type(record).__name__}")
    elif key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise BadRecord(
            "no such key", f"no key {key!r}; there are {keys} (choose one with --text-key)"
        )
    else:
        text = record[key]
        if isinstance(text, list) and all(isinstance(part, str) for part in text):
            text = "\n\n".join(text)
    if not isinstance(text, str):
        shown = json.dumps(text, default=str)[:40]
        reason = "null" if text is None else f"a {type(text).__name__}, not text"
        raise BadRecord(reason, f"{key!r} is {shown}, not text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRecord(
                "lone surrogate",
                f"character {error.start} is a lone surrogate, which UTF-8 cannot hold",
            ) from None
    return text


def decode(data: bytes) -> str:
    """UTF-8 as it stands; BadRecord for anything else."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadRecord("not UTF-8", "is UTF-16; convert it to UTF-8")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        what = f"not UTF-8 at byte {error.start} (0x{data[error.start]:02x})"
        raise BadRecord("not UTF-8", what) from None


def _key_once(key: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; BadRecord where `key` is there twice, of which Python keeps the last."""
    record = dict(pairs)
    if len(record) < len(pairs) and sum(name == key for name, _ in pairs) > 1:
        raise BadRecord("a key twice", f"has the key {key!r} twice, so one text would be lost")
    return record


def _parsed(line: bytes, key: str) -> Any:
    text = decode(line)
    # A look at each object in Python takes time: only where there is reason to. None at all is one:
    # JSON may spell the key in escapes, and does so by default where it is not ASCII.
    suspect = text.count(f'"{key}"') != 1
    try:
        return json.loads(text, object_pairs_hook=partial(_key_once, key) if suspect else None)
    except BadRecord:
        raise
    except RecursionError:
        raise BadRecord("not JSON", "not JSON: nested too deeply") from None
    except ValueError as error:
        hint = " (indented JSON or an array? one object per line is wanted)"
        raise BadRecord("not JSON", f"not JSON: {error}{hint if len(text) < 3 else ''}") from None


def _check_head(head: bytes, name: str) -> None:
    if not head:
        raise DataError(f"{name}: has no bytes, so it is no file of JSON; get it anew")
    kind = kind_of(head)
    if kind is not None:
        raise DataError(f"{name}: is {kind}, not JSON lines; give it the ending that says so")
