"""Which document goes where: by hash of its text, or by position as GPT-NeoX cuts one file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from data_prep.errors import DataError, UsageError
from data_prep.reading import Document
from data_prep.seen import Seen

NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[Fraction, Fraction, Fraction]:
    """``88,10,2`` -> three shares that sum to 1; missing ones are 0."""
    try:
        parts = [Fraction(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"split {text!r}: three numbers like 88,10,2 are wanted") from error
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not parts[0]:
        raise UsageError(f"split {text!r}: one to three numbers >= 0, the first above 0")
    parts += [Fraction(0)] * (3 - len(parts))
    total = sum(parts)
    return parts[0] / total, parts[1] / total, parts[2] / total


def digest_of(text: str) -> bytes:
    """sha256 of the text in UTF-8."""
    return hashlib.sha256(text.encode()).digest()


def split_of(digest: bytes, shares: tuple[Fraction, Fraction, Fraction]) -> str:
    """The split of a document: its hash as a fraction of 2**64 against the shares.

    It depends on the text alone, so adding documents never moves one from train to valid.
    """
    position = Fraction(int.from_bytes(digest[:8], "big"), 2**64)
    if position < shares[0]:
        return "train"
    return "valid" if position < shares[0] + shares[1] else "test"


@dataclass
class Selection:
    """What to keep of a corpus and, while it runs, the counts of what was dropped.

    ``min_characters``: shorter documents are dropped. ``max_bytes``: longer ones keep their start,
    up to the last line end below (UTF-8 bytes), so that one manual cannot be half of a split; the
    rest of those that are kept is counted in ``cut_bytes``. What is left of a text decides whether it
    is too short, a duplicate, and in which split it goes. Exact duplicates are dropped unless
    ``keep_duplicates``. ``repair`` (such as ftfy's) comes before everything else; what it changed is
    counted in ``repaired``. ``published`` names the split of a document where the corpus has fixed ones.
    """

    shares: tuple[Fraction, Fraction, Fraction]
    min_characters: int = 0
    max_bytes: int | None = None
    keep_duplicates: bool = False
    repair: Callable[[str], str] | None = None
    published: Callable[[Document], str] | None = None
    repaired: int = 0
    too_short: int = 0
    duplicates: int = 0
    cut: int = 0
    cut_bytes: int = 0

    def apply(self, documents: Iterable[Document]) -> Iterator[tuple[bytes, str, Document]]:
        """Yield (digest, split, document). Memory: at most 16 bytes a document (see `Seen`)."""
        seen = Seen()
        for document in documents:
            whole = self._repaired(document)
            # First of all: texts that differ in what is cut off are one text from here on.
            document = self._shortened(whole)
            if len(document.text) < self.min_characters:
                self.too_short += 1
                continue
            digest = digest_of(document.text)
            if not self.keep_duplicates and not seen.add(digest):
                self.duplicates += 1
                continue
            if document is not whole:
                self.cut += 1
                self.cut_bytes += len(whole.text.encode()) - len(document.text.encode())
            published = self.published
            split = published(document) if published else split_of(digest, self.shares)
            yield digest, split, document

    def _repaired(self, document: Document) -> Document:
        if self.repair is None:
            return document
        text = self.repair(document.text)
        if text == document.text:
            return document
        self.repaired += 1
        return Document(text, document.origin)

    def _shortened(self, document: Document) -> Document:
        if self.max_bytes is None or len(document.text) * 4 <= self.max_bytes:
            return document
        data = document.text.encode()
        if len(data) <= self.max_bytes:
            return document
        head = data[: self.max_bytes]
        if b"\n" in head:
            head = head[: head.rindex(b"\n") + 1]
        text = head.decode(errors="ignore")  # only a character cut in two at the end can be wrong
        return Document(text, document.origin)


def split_ranges(split: str, documents: int) -> list[tuple[int, int]]:
    """Train, valid and test as ranges of document numbers, by GPT-NeoX's rule for ``split``.

    ``split``: one to three (further ones are ignored) weights joined by commas or, without commas,
    slashes. Each range gets its rounded share; what rounding leaves over moves all three borders,
    so the first range grows or shrinks. (NeoX: megatron/data/data_utils.py.)
    """
    if documents < 1:
        raise DataError(f"split {split!r}: there are no documents to split")
    separator = "," if "," in split else "/"
    try:
        weights = [float(part) for part in split.split(separator)]
    except ValueError as error:
        raise UsageError(f"split {split!r}: numbers like 949,50,1 are wanted") from error
    weights = (weights + [0.0, 0.0])[:3]
    if not all(0 <= weight < float("inf") for weight in weights) or not sum(weights):
        raise UsageError(f"split {split!r}: weights must be >= 0 and not all 0")
    total = sum(weights)
    borders = [0]
    for weight in weights:
        borders.append(borders[-1] + round(weight / total * float(documents)))
    surplus = borders[-1] - documents
    borders = [0, *(border - surplus for border in borders[1:])]
    if borders != sorted(borders):
        raise UsageError(f"split {split!r} of {documents} documents gives the borders {borders}")
    return list(zip(borders, borders[1:], strict=False))
