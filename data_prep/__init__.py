"""Text in, GPT-NeoX's ``.bin/.idx`` out. Imports numpy alone; everything else loads when used."""

from data_prep.errors import DataError, UsageError

__all__ = ["DataError", "UsageError"]
