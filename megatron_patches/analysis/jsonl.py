"""JSON lines on disk: appended under a lock, read strictly.

One object a line. An append is one write under an exclusive lock followed by fsync, so that
several processes may share a file and a crash leaves whole lines only.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 64 * 2**20  # a row with two million window losses is about 40 MiB
MAX_FILE_BYTES = 4 * 2**30


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_UNPRINTED = re.compile(rf"{CONTROL.pattern}|[\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` with control characters spelt out: names inside files must not drive a terminal."""
    return _UNPRINTED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class RowError(ValueError):
    """A result that cannot be trusted: malformed, inconsistent, or not comparable."""


class UsageError(RowError):
    """A choice of rows that cannot be right: options that leave none, or name what is not there."""


def dump(value: Any) -> str:
    """One line of strict JSON (no NaN, no infinity, no newline); TypeError or ValueError else."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(", ", ": "))


def parse(text: str) -> Any:
    """Strict JSON: NaN, infinities (also ``1e999``) and repeated keys raise ValueError."""
    return json.loads(
        text,
        parse_constant=_refuse_constant,
        parse_float=_finite_float,
        object_pairs_hook=_unique_keys,
    )


def append_lines(path: str | os.PathLike[str], objects: Iterable[dict[str, Any]]) -> None:
    """Append ``objects`` to ``path``, one JSON line each; creates file and folders.

    Nothing is written when an object is not strict JSON, when there are no objects, or when the
    file ends in a truncated line (RowError names the line). If the write itself fails, the file
    is cut back to its former size and the OSError passes on.
    """
    path = Path(path)
    try:
        payload = "".join(dump(item) + "\n" for item in objects).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise RowError(f"{path}: not written, a value is not strict JSON: {error}") from error
    if not payload:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            raise RowError(
                f"{path}:{_count_lines(path)}: the last line is truncated (no newline at its "
                "end); repair or remove that line before appending"
            )
        try:
            _write_all(descriptor, payload)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def read_objects(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``("file:line", object)`` for each line of ``path``, under a shared lock.

    RowError names file and line of: a truncated last line, an empty line, text that is not strict
    JSON, a line that is no object, and anything beyond MAX_LINE_BYTES or MAX_FILE_BYTES.
    A missing file is a RowError too.
    """
    path = Path(path)
    try:
        stream = path.open("rb")
    except OSError as error:
        raise RowError(f"{path}: cannot be read: {error.strerror}") from error
    with stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_SH)
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise RowError(f"{path}: {size} bytes, more than the limit of {MAX_FILE_BYTES}")
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            yield f"{path}:{number}", _parse_line(f"{path}:{number}", line)


def _parse_line(where: str, line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise RowError(f"{where}: line longer than the limit of {MAX_LINE_BYTES} bytes")
    if not line.endswith(b"\n"):
        raise RowError(f"{where}: the last line is truncated (no newline at its end)")
    try:
        value = parse(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where}: not strict JSON: {error}") from error
    if not isinstance(value, dict):
        raise RowError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _write_all(descriptor: int, payload: bytes) -> None:
    # One call writes everything on a local disk; the loop is for file systems that write less.
    view = memoryview(payload)
    while view:
        view = view[os.write(descriptor, view) :]


def _count_lines(path: Path) -> int:
    with path.open("rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(2**20), b"")) + 1


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} does not fit a float")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"repeated key {', '.join(repeated)}")
    return result
