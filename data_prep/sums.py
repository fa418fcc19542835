"""Expected sha256 of the input files, checked as soon as each has been read to its end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from data_prep.errors import DataError, UsageError

_LINE = re.compile(r"\\?([0-9a-fA-F]{64}) [ *](.+)")
_SUM = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class Sums:
    """``wanted``: path -> (sha256, whose it is)."""

    wanted: Mapping[str, tuple[str, str]]

    @classmethod
    def of(
        cls, given: list[str], files: list[Path], published: Mapping[str, tuple[str, str]]
    ) -> Sums:
        """``given``: one sum for each of ``files``, in their order, or one file as sha256sum makes.

        They take the place of published ones. UsageError where a file has no sum, or a sum no file.
        """
        if not given:
            return cls(published)
        if len(given) == 1 and not _SUM.fullmatch(given[0]):
            return cls(_from_file(Path(given[0]), files))
        wrong = [text for text in given if not _SUM.fullmatch(text)]
        if wrong:
            raise UsageError(f"--sha256 {wrong[0]}: 64 hexadecimal digits are wanted")
        if len(given) != len(files):
            raise UsageError(
                f"--sha256 has {len(given)} sums for {len(files)} input files; give one each, in "
                "their order, or a file as sha256sum writes it"
            )
        pairs = zip(files, given, strict=True)
        return cls({str(path): (sha256.lower(), "given by --sha256") for path, sha256 in pairs})

    def check(self, found: Mapping[str, str]) -> None:
        """DataError for a file whose sum is not the wanted one."""
        for path, (wanted, whose) in self.wanted.items():
            sha256 = found.get(path, wanted)
            if sha256 != wanted:
                raise DataError(
                    f"{path}: sha256 {sha256[:12]} is not that {whose} ({wanted[:12]}); "
                    "get it anew, or correct the sum or the name if it is another edition"
                )


@dataclass(frozen=True)
class _Listed:
    """A line of a file of sums."""

    number: int
    name: Path
    sha256: str

    def nearness(self, path: Path) -> tuple[bool, int]:
        """Whether ``path`` ends in the whole name, and how many parts the two ends share."""
        parts = [part for part in self.name.parts if part != ".."]
        pairs = zip(reversed(parts), reversed(path.absolute().parts), strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return shared == len(parts), shared


def published_sums(
    known: Mapping[str, str | None], files: list[Path]
) -> dict[str, tuple[str, str]]:
    """A published file under its own name must be that file."""
    sums = {str(path): known.get(path.name) for path in files}
    return {path: (sha256, "of the published file") for path, sha256 in sums.items() if sha256}


def _from_file(listing: Path, files: list[Path]) -> dict[str, tuple[str, str]]:
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--sha256 {listing}: neither 64 hexadecimal digits nor a readable file of sums"
        ) from error
    sums: list[_Listed] = []
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if not match and line.strip():
            raise UsageError(
                f"{listing}:{number}: 'SHA256  NAME' is wanted, as sha256sum writes it"
            )
        if match:
            sums.append(_Listed(number, Path(match[2]), match[1].lower()))
    return {str(path): (_sum_of(path, sums, listing), f"in {listing}") for path in files}


def _sum_of(path: Path, sums: list[_Listed], listing: Path) -> str:
    """That of the name that ``path`` ends in, else of the one that shares most with its end."""
    near = [(entry.nearness(path), entry) for entry in sums if entry.name.name == path.name]
    if not near:
        raise UsageError(f"{listing} has no sum of {path.name}, an input file")
    best = max(nearness for nearness, _ in near)
    first, *others = [entry for nearness, entry in near if nearness == best]
    for other in others:
        if other.sha256 != first.sha256:
            raise UsageError(
                f"{listing}:{other.number}: a second, other sum of {path.name}, after line "
                f"{first.number}; let the names say which of them is {path}"
            )
    return first.sha256
