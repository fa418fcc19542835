"""Which texts were met before, in a bounded number of bytes a text."""

from __future__ import annotations

from array import array
from bisect import bisect_left

_SHELVES = 1 << 16


class Seen:
    """A set of 64-bit hashes: about 10, at most 16 bytes each, besides 5 MB for the shelves.

    Python's own set takes 60 to 100. Sorted arrays, one for each value of the first 16 bits, hold
    nothing but the hashes and what an array keeps in reserve (a sixteenth). Of 17 million texts
    one false duplicate is expected in 130,000 corpora.
    """

    def __init__(self) -> None:
        self._shelves: list[array[int] | None] = [None] * _SHELVES

    def add(self, digest: bytes) -> bool:
        """Whether the text with this hash (8 bytes or more) is new; it is known afterwards."""
        key = int.from_bytes(digest[:8], "big")
        shelf = self._shelves[key >> 48]
        if shelf is None:
            shelf = self._shelves[key >> 48] = array("Q")
        place = bisect_left(shelf, key)
        if place < len(shelf) and shelf[place] == key:
            return False
        shelf.insert(place, key)
        return True
