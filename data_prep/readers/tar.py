"""Tar archives read forward, member after member; nothing is written and no name is a path.

Python's tarfile takes a damaged header in the middle for the end, keeps a record of each member
in memory and does not miss the end mark. Here a header that is not one is an error, and an archive
without its end mark (two blocks of zeros; one is accepted) is cut short.

Only regular files are read. Links, devices and sparse files hold no text of their own: each is a
bad document. Hidden files are left out, as in folders, and counted. Archives joined end to end are
read as one.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data_prep.errors import DataError
from data_prep.readers.base import BLOCK, BadRecord, Document, Reading, Source
from data_prep.readers.streams import Exact

_BLOCK = 512
# Of one extended header; names and numbers need some hundred bytes.
HEADER_LIMIT = 1 << 20
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_NO_DATA = {
    tarfile.LNKTYPE: "a link",
    tarfile.SYMTYPE: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}
_GNU_DUMPDIR, _GNU_VOLUME = b"D", b"V"


@dataclass(frozen=True, slots=True)
class Member:
    """A member as its headers give it. ``refused``: why it is no regular file, if it is not."""

    name: str
    size: int
    refused: str | None
    folder: bool

    @property
    def hidden(self) -> bool:
        """Whether its name, or that of a folder above it, begins with a dot: notes of a system."""
        parts = self.name.split("/")
        return not self.folder and any(p.startswith(".") and p.strip(".") for p in parts)


def read_members(
    source: Source,
    reading: Reading,
    read_member: Callable[[Source, str, Reading], Iterator[Document]],
) -> Iterator[Document]:
    """The documents that ``read_member`` makes of each regular member and its name."""
    data = Exact(source.blocks)
    while (member := _next_member(data, source.name)) is not None:
        content = _Content(data, member, source.name)
        where = f"{source.name}!{member.name}"
        if member.refused:
            reading.refuse(
                where, BadRecord(member.refused, f"{member.refused}, not a regular file")
            )
        elif member.hidden:
            reading.hidden += 1
        elif not member.folder:
            yield from read_member(Source(where, content), member.name, reading)
        content.leave()


class _Content:
    """The blocks of one member, its padding left out; an iterator. The archive moves with it."""

    def __init__(self, data: Exact, member: Member, archive: str) -> None:
        self._data, self._member, self._archive = data, member, archive
        self._left = member.size

    def __iter__(self) -> _Content:
        return self

    def __next__(self) -> bytes:
        if not self._left:
            raise StopIteration
        block = self._data.some(min(self._left, BLOCK))
        if not block:
            raise DataError(
                f"{self._archive}!{self._member.name}: cut short, the archive ends at byte "
                f"{self._data.position}, {self._left} bytes before this member does; get it anew"
            )
        self._left -= len(block)
        return block

    def leave(self) -> None:
        """Past what was not read, and past the padding."""
        for _ in self:
            pass
        self._data.take(-self._member.size % _BLOCK)  # a cut here is one before the end mark


def _next_member(data: Exact, archive: str) -> Member | None:
    """The next member with the extended headers before it, None after the end mark."""
    extended: dict[str, str] = {}
    ended = False
    while True:
        start = data.position
        block = data.take(_BLOCK)
        if not block and ended:
            return None
        if len(block) < _BLOCK:
            raise _cut(archive, data)
        if not block.strip(b"\0"):
            if extended:
                raise DataError(f"{archive}: byte {start}: an extended header without a member")
            ended = True
            continue
        info = _header(block, archive, start)
        kind = info.type
        if kind in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE):
            keys = _pax(_extended(data, info, archive, start), archive, start)
            if kind != tarfile.XGLTYPE:
                extended.update(keys)
            elif any(key in ("path", "size") or "sparse" in key for key in keys):
                raise DataError(f"{archive}: byte {start}: one path or size for all members")
        elif kind == tarfile.GNUTYPE_LONGNAME:
            extended["path"] = _name(_extended(data, info, archive, start).split(b"\0")[0])
        elif kind in (tarfile.GNUTYPE_LONGLINK, _GNU_VOLUME):
            _extended(data, info, archive, start)
        else:
            return _member(data, info, block, extended, archive, start)


def _member(
    data: Exact,
    info: tarfile.TarInfo,
    block: bytes,
    extended: dict[str, str],
    archive: str,
    start: int,
) -> Member:
    name = extended.get("path") or _name(info.name.encode("utf-8", "surrogateescape"))
    size = extended.get("size", str(info.size))
    if not size.isascii() or not size.isdigit() or len(size) > 19:
        raise DataError(f"{archive}!{name}: a size of {size[:40]!r} at byte {start}: damaged")
    refused = _NO_DATA.get(info.type)
    folder = info.type in (tarfile.DIRTYPE, _GNU_DUMPDIR)
    if info.type == tarfile.GNUTYPE_SPARSE:
        _skip_sparse_map(data, block, archive)
        refused = "a sparse file"
    elif any(key.startswith("GNU.sparse") for key in extended):
        refused = "a sparse file"
    elif info.type == tarfile.AREGTYPE and name.endswith("/"):
        folder = True  # as tar wrote folders before 1988
    elif not refused and not folder and info.type not in _REGULAR:
        refused = f"a tar member of type {info.type.decode('latin-1')!r}"
    no_data = info.type in _NO_DATA or info.type == tarfile.DIRTYPE
    return Member(name, 0 if no_data else int(size), refused, folder)


def _header(block: bytes, archive: str, start: int) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise DataError(
            f"{archive}: no tar header at byte {start} of the archive ({error}); damaged, get it "
            "anew"
        ) from error
    if info.size < 0:
        raise DataError(f"{archive}: a negative size at byte {start} of the archive: damaged")
    return info


def _extended(data: Exact, info: tarfile.TarInfo, archive: str, start: int) -> bytes:
    if info.size > HEADER_LIMIT:
        raise DataError(f"{archive}: refused, an extended header of {info.size} bytes at {start}")
    padded = info.size + -info.size % _BLOCK
    content = data.take(padded)
    if len(content) < padded:
        raise _cut(archive, data)
    return content[: info.size]


def _pax(content: bytes, archive: str, start: int) -> dict[str, str]:
    """``LENGTH KEY=VALUE\\n`` again and again; the length counts the whole record."""
    keys: dict[str, str] = {}
    while content.strip(b"\0"):
        digits, space, _ = content[:24].partition(b" ")
        length = int(digits) if digits.isdigit() and space else 0
        record = content[len(digits) + 1 : length]
        key, equals, value = record[:-1].partition(b"=")
        if not equals or len(content) < length or record[-1:] != b"\n":
            raise DataError(f"{archive}: a damaged extended header at byte {start}")
        keys[key.decode("utf-8", "replace")] = _name(value)
        content = content[length:]
    return keys


def _name(data: bytes) -> str:
    """For messages and endings alone: bytes and signs that a terminal would obey are escaped."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _skip_sparse_map(data: Exact, block: bytes, archive: str) -> None:
    """Old GNU sparse files: further blocks of the map follow while a byte says so."""
    more = block[482]
    while more:
        block = data.take(_BLOCK)
        if len(block) < _BLOCK:
            raise _cut(archive, data)
        more = block[504]


def _cut(archive: str, data: Exact) -> DataError:
    return DataError(
        f"{archive}: cut short, the tar archive ends at byte {data.position} without its end mark; "
        "get it anew"
    )
