"""The one exception of this package, and its special cases."""

from __future__ import annotations


class DataError(ValueError):
    """Input, output or an option is not usable; the message names the file and what to do."""


class UsageError(DataError):
    """The request itself is wrong (an option, a missing input): exit code 2, not 1."""


class Damaged(DataError):
    """The bytes of one file or archive member are cut, damaged or foreign; ``name`` says whose."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name
