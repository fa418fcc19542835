"""A downloaded archive of a checkpoint, read as untrusted input; torch is not needed.

Nothing is extracted by the archive libraries: they say what is inside and hand over its bytes. Every
member is judged before any is read, and a single bad one refuses the archive. `unpack` writes the files.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data_prep.errors import DataError
from megatron_patches.standalone.forward import BLOCK, TAR_BLOCK, Forward, expanded, read_on

# A step folder of 12 layers has about 20 files, one of a large run with optimizer shards some hundreds.
MAX_MEMBERS = 4096
# 162M parameters are 0.3 GB in bfloat16 and 2.3 GB with their optimizer: room for many steps of them.
MAX_BYTES = 64 << 30
# Weights hardly compress (float32 that came from bfloat16 to a half); text does by 5 or 10.
MAX_RATIO = 50
# Below this the ratio does not count: a few padded configuration files may well exceed it.
FREE_BYTES = 16 << 20

_DRIVE = re.compile(r"[A-Za-z]:")
# What the libraries raise on bytes that they cannot make sense of.
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, struct.error),
    *(gzip.BadGzipFile, NotImplementedError, OverflowError, RecursionError),
)


@dataclass(frozen=True)
class Member:
    """A regular file inside: its judged name with `/` between parts, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class _Item:
    """A member (None: a folder) and how to read it while the archive stands at it."""

    member: Member | None
    blocks: Callable[[], Iterator[bytes]] = lambda: iter(())


class Archive:
    """A file or folder of a known kind. Raises DataError for another kind; nothing is read yet."""

    def __init__(self, path: Path) -> None:
        found = [kind for kind in _KINDS if path.name.lower().endswith(kind)]
        if path.is_dir():
            self._items: Callable[[Path], Iterator[_Item]] = _folder_items
        elif path.is_file() and found:
            self._items = _KINDS[max(found, key=len)]
        else:
            raise DataError(
                f"{path}: not an archive known here; it takes {', '.join(_KINDS)} or a folder that is "
                "already unpacked"
            )
        self.path = path

    def members(self) -> list[Member]:
        """All files inside, judged. Raises DataError naming the first thing that is not right."""
        with _readable(self.path):
            return _judged((item.member for item in self._items(self.path)), self.path)

    def read(self, wanted: Mapping[str, int]) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Name and blocks of the `wanted` members (name -> size) in the archive's order.

        Raises DataError when one is damaged, cut, or no longer what `members` saw.
        """
        left = dict(wanted)
        with _readable(self.path):
            for item in self._items(self.path):
                if item.member is not None and left.pop(item.member.name, None) is not None:
                    size = wanted[item.member.name]
                    yield item.member.name, self._exactly(item, size)
        if left:
            raise DataError(f"{self.path}: changed while it was read: {min(left)} is gone")

    def _exactly(self, item: _Item, size: int) -> Iterator[bytes]:
        found = 0
        with _readable(self.path):  # the caller draws the blocks, outside the `with` of `read`
            for block in item.blocks():
                found += len(block)
                if found > size:
                    break
                yield block
            if found != size:
                assert item.member is not None
                raise EOFError(f"{item.member.name} has not the {size} bytes that were announced")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        why = str(error) or type(error).__name__
        raise DataError(f"{path}: damaged or cut short ({why}); get the file anew") from error


# ---- judging ---------------------------------------------------------------------------------


def _judged(members: Iterable[Member | None], path: Path) -> list[Member]:
    kept: list[Member] = []
    seen: dict[str, str] = {}
    count = total = 0
    for member in members:
        count += 1
        if count > MAX_MEMBERS:
            raise DataError(f"{path}: more than {MAX_MEMBERS} members, not a checkpoint")
        if member is None:
            continue
        total += member.size
        _check_size(total, MAX_BYTES, path)  # the ratio is the business of each kind
        # Other file systems fold case and accents: what is two files here would be one there.
        folded = unicodedata.normalize("NFC", member.name).casefold()
        if folded in seen:
            same = "is there twice" if seen[folded] == member.name else f"and {seen[folded]} clash"
            raise DataError(f"{path}: {member.name} {same}")
        seen[folded] = member.name
        kept.append(member)
    return kept


def _allowed(path: Path) -> int:
    """Bytes that an archive of this size may expand to."""
    return min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * path.stat().st_size))


def _check_size(size: int, allowed: int, path: Path) -> None:
    if size > allowed:
        why = f"{MAX_BYTES >> 30} GiB" if allowed == MAX_BYTES else f"{MAX_RATIO} times its size"
        raise DataError(f"{path}: refused, it expands to more than {why}")


def _safe_name(raw: str, path: Path) -> str:
    """`raw` without `.` parts. Raises DataError for a name that leads elsewhere or hides something."""
    parts = [part for part in raw.split("/") if part not in ("", ".")]
    absolute = raw.startswith("/") or _DRIVE.match(raw)
    if absolute or "\\" in raw or ".." in parts or not raw.isprintable():
        raise DataError(
            f"{path}: refused, a member is named {ascii(raw)[:120]}: absolute, with `..`, a drive, a "
            "backslash or unprintable"
        )
    return "/".join(parts)


def _refuse_kind(name: str, kind: str, path: Path) -> DataError:
    return DataError(
        f"{path}: refused, {name} is {kind}; a checkpoint has plain files and folders only"
    )


# ---- kinds of archives -----------------------------------------------------------------------


def _folder_items(path: Path) -> Iterator[_Item]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(path, onerror=fail):
        folders.sort()
        for name in [*folders, *sorted(files)]:
            file = Path(folder) / name
            status = os.lstat(file)
            shown = _safe_name(file.relative_to(path).as_posix(), path)
            if stat.S_ISLNK(status.st_mode):
                raise _refuse_kind(shown, "a link", path)
            if stat.S_ISREG(status.st_mode):
                yield _Item(Member(shown, status.st_size), partial(_blocks_of, file))
            elif stat.S_ISDIR(status.st_mode):
                yield _Item(None)
            else:
                raise _refuse_kind(shown, "a device, pipe or socket", path)


def _blocks_of(file: Path) -> Iterator[bytes]:
    # Not through a link that appeared since the folder was looked at.
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as stream:
        yield from read_on(stream)


def _zip_items(path: Path) -> Iterator[_Item]:
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        size = path.stat().st_size
        if any(not info.filename or not 0 <= info.header_offset < size for info in infos):
            raise zipfile.BadZipFile("a member without a name or a place")
        _check_size(sum(info.file_size for info in infos), _allowed(path), path)
        for info in infos:
            # `filename` is cut at a zero byte; the original is what other programs go by.
            name = _safe_name(info.orig_filename, path)
            mode = info.external_attr >> 16
            if stat.S_ISLNK(mode):
                raise _refuse_kind(name, "a link", path)
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refuse_kind(name, "a device, pipe or socket", path)
            if info.flag_bits & 1:
                raise _refuse_kind(name, "encrypted", path)
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _refuse_kind(name, "compressed in a rare way", path)
            member = None if info.is_dir() else Member(name, info.file_size)
            yield _Item(member, partial(_zip_blocks, archive, info))


def _zip_blocks(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(info) as stream:
        yield from read_on(stream)  # checks the CRC at the end


def _tar_items(path: Path) -> Iterator[_Item]:
    with open(path, "rb") as raw:
        allowed = _allowed(path)
        stream = Forward(expanded(raw, path), path, lambda size: _check_size(size, allowed, path))
        # `r:` reads through our object alone; its other modes buffer and skip behind our back.
        with tarfile.open(fileobj=stream, mode="r:") as archive:  # type: ignore[call-overload]
            while (info := archive.next()) is not None:
                yield _tar_item(info, stream, path)
        # tarfile takes a damaged header, or the end of the bytes, for the end of the archive.
        if stream.last != bytes(TAR_BLOCK):
            raise DataError(f"{path}: cut short or damaged, it has no end mark; get the file anew")
        stream.drain()  # reaches the checks that gzip and zstd make at their end


def _tar_item(info: tarfile.TarInfo, stream: Forward, path: Path) -> _Item:
    name = _safe_name(info.name, path)
    if info.issym() or info.islnk():
        raise _refuse_kind(name, "a link", path)
    if info.isdir():
        return _Item(None)
    if not info.isreg() or info.issparse():
        raise _refuse_kind(name, "a device, a pipe or a sparse file", path)

    def blocks() -> Iterator[bytes]:
        stream.seek(info.offset_data)
        left = info.size
        while left:
            data = stream.read(min(left, BLOCK))
            if not data:
                raise tarfile.ReadError(f"{name} is cut")
            left -= len(data)
            yield data

    return _Item(Member(name, info.size), blocks)


_KINDS: dict[str, Callable[[Path], Iterator[_Item]]] = {
    ".zip": _zip_items,
    ".tar": _tar_items,
    ".tar.gz": _tar_items,
    ".tgz": _tar_items,
    ".tar.zst": _tar_items,
}
