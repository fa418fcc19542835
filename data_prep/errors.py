"""The one exception of this package, and its special cases."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` with control characters spelt out: names inside files must not drive a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class DataError(ValueError):
    """Input, output or an option is not usable; the message names the file and what to do."""


class UsageError(DataError):
    """The request itself is wrong (an option, a missing input): exit code 2, not 1."""


class Damaged(DataError):
    """The bytes of one file or archive member are cut, damaged or foreign; ``name`` says whose."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name
