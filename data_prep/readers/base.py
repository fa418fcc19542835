"""What every reader shares: a document, the options and counts of a reading, a named source."""

from __future__ import annotations

import difflib
import hashlib
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_prep.errors import DataError, UsageError

BLOCK = 1 << 16
# A document is one string in memory, so there is a longest one: of a line, a text, a .dat record.
DOCUMENT_LIMIT = 1 << 30

# The Pile's components, as `meta.pile_set_name` spells them.
PILE_SETS = (
    "Pile-CC",
    "PubMed Central",
    "Books3",
    "OpenWebText2",
    "ArXiv",
    "Github",
    "FreeLaw",
    "StackExchange",
    "USPTO Backgrounds",
    "PubMed Abstracts",
    "Gutenberg (PG-19)",
    "OpenSubtitles",
    "Wikipedia (en)",
    "DM Mathematics",
    "Ubuntu IRC",
    "BookCorpus2",
    "EuroParl",
    "HackerNews",
    "YoutubeSubtitles",
    "PhilPapers",
    "NIH ExPorter",
    "Enron Emails",
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it came from (``file.jsonl:17``, ``file.tar!member.jsonl:17``)."""

    text: str
    origin: str


class BadRecord(ValueError):
    """One document is not usable. ``reason``: a few words that are the same for all its kind."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


@dataclass
class Reading:
    """Options of a reading and, while it runs, its counts.

    ``on_bad_line``: ``stop`` raises at the first bad record, ``skip`` counts it, in all (``bad``)
    and by reason (``bad_reasons``). ``pile_set``: keep the records whose ``meta.pile_set_name``
    is exactly this; the others are counted in ``other_sets``. ``hidden`` counts members
    of tar archives whose names begin with a dot, which are left out. ``sources`` maps each file read
    to the end to its sha256; ``input_bytes`` is the progress through the files.
    """

    text_key: str = "text"
    on_bad_line: str = "stop"
    pile_set: str | None = None
    documents: int = 0
    empty: int = 0
    bad: int = 0
    blank_lines: int = 0
    other_sets: int = 0
    hidden: int = 0
    first_bad: str | None = None
    input_bytes: int = 0
    bad_reasons: dict[str, int] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pile_set(self.pile_set)

    def refuse(self, where: str, bad: BadRecord) -> None:
        """Raise, or count, as ``on_bad_line`` says."""
        if self.on_bad_line == "stop":
            raise DataError(
                f"{where}: {bad}; correct it, or count and skip with --on-bad-line skip"
            )
        self.bad += 1
        self.bad_reasons[bad.reason] = self.bad_reasons.get(bad.reason, 0) + 1
        self.first_bad = self.first_bad or f"{where}: {bad}"


def check_pile_set(name: str | None) -> None:
    """UsageError, with the nearest names, unless ``name`` is one of the Pile's 22 (or None)."""
    if name is None or name in PILE_SETS:
        return
    spelled = {known.lower(): known for known in PILE_SETS}
    near = difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.5)
    meant = " or ".join(repr(spelled[key]) for key in near)
    raise UsageError(
        f"--pile-set {name!r}: the Pile has no such set; "
        + (f"is {meant} meant?" if meant else f"there are {', '.join(PILE_SETS)}")
    )


@dataclass(frozen=True)
class Source:
    """The bytes of a file or a member, forward only, and the ``name`` that messages give it.

    ``path``: the file itself, for formats that cannot be read forward; None inside an archive.
    """

    name: str
    blocks: Iterator[bytes]
    path: Path | None = None

    def through(self, change: Callable[[Iterator[bytes], str], Iterator[bytes]]) -> Source:
        """The same source decompressed, or checked, on its way."""
        return replace(self, blocks=change(self.blocks, self.name))


Reader = Callable[[Source, Reading], Iterator[Document]]


def check_regular(path: Path) -> None:
    """DataError unless ``path`` is a regular file or a link to one: a pipe would never end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if path.is_symlink():
            raise DataError(
                f"{path}: a link to what cannot be reached ({error.strerror}); restore its target "
                "or remove the link"
            ) from error
        raise DataError(
            f"{path}: {error.strerror}; make it readable, or move it out of the input"
        ) from error
    if not stat.S_ISREG(mode):
        kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder"))
        kind = next((name for test, name in kinds if test(mode)), "a device")
        raise DataError(
            f"{path}: {kind}, not a regular file; write its content to a file and give that, or "
            "move it out of the input"
        )


class Hashed:
    """Blocks of an open file, hashed and counted on their way; an iterator."""

    def __init__(self, path: Path, reading: Reading) -> None:
        check_regular(path)
        self._raw = open(path, "rb")  # noqa: SIM115  closed by `close`
        self._reading = reading
        self._digest = hashlib.sha256()

    def __iter__(self) -> Hashed:
        return self

    def __next__(self) -> bytes:
        block = self._raw.read(BLOCK)
        if not block:
            raise StopIteration
        self._digest.update(block)
        self._reading.input_bytes += len(block)
        return block

    def sha256(self) -> str:
        """Of the whole file: what no reader asked for is read now."""
        for _ in self:
            pass
        return self._digest.hexdigest()

    def close(self) -> None:
        self._raw.close()


_MAGIC = (
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"%PDF-", "PDF"),
    (b"\x89PNG", "PNG"),
    (b"MMIDIDX", "a .idx file"),
)


def kind_of(head: bytes) -> str | None:
    """What the first bytes of a file say it is, None for text and what is not known."""
    # A text may hold these five letters at that place, but not the octal sum of a header before them.
    if head[257:262] == b"ustar" and not head[148:156].strip(b"01234567 \0"):
        return "tar"
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
