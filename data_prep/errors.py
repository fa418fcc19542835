"""The one exception of this package."""

from __future__ import annotations


class DataError(ValueError):
    """Input, output or an option is not usable; the message names the file and what to do."""


class UsageError(DataError):
    """The request itself is wrong (an option, a missing input): exit code 2, not 1."""
