"""Files of many articles, one line a paragraph, as WikiText has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from data_prep.errors import DataError, UsageError
from data_prep.readers.base import Hashed
from data_prep.reading import Document, Reading, lines

SPLIT_FILES = {
    f"wiki.{split}.{kind}": split
    for kind in ("tokens", "raw")
    for split in ("train", "valid", "test")
}
_TITLE = re.compile(r" ?= [^=].* = ?\n?")


def expand(inputs: Iterable[str | Path]) -> list[Path]:
    """The files of one edition, by their own names or by the folder they lie in, train first."""
    given = [Path(path) for path in inputs]
    files: list[Path] = []
    for path in given:
        here = [path / name for name in SPLIT_FILES] if path.is_dir() else [path]
        found = [file for file in here if file.is_file()]
        if not found:
            raise UsageError(f"{path}: no such file, and no folder with wiki.train.tokens or .raw")
        files += found
    for file in files:
        if file.name not in SPLIT_FILES:
            raise UsageError(f"{file}: the file's name must be one of {', '.join(SPLIT_FILES)}")
    if len({file.suffix for file in files}) > 1:
        raise UsageError("give .tokens or .raw files, not both: they are two editions of one text")
    if len({file.name for file in files}) != len(files):
        raise UsageError("an input file is named twice; its documents would be counted twice")
    return sorted(files, key=lambda file: list(SPLIT_FILES).index(file.name))


def read(files: Iterable[Path], reading: Reading) -> Iterator[Document]:
    """One document an article, with the line of its title as origin.

    A title stands alone: between blank lines. DataError for text before the first one.
    """
    for path in files:
        for document in _articles(path, reading):
            reading.documents += 1
            yield document


def _articles(path: Path, reading: Reading) -> Iterator[Document]:
    article: list[str] = []
    begun = 0
    previous, pending = "", None  # a title is known by the line after it
    for number, line in _lines(path, reading):
        if pending is not None:
            if not line.strip():
                if article:
                    yield Document("".join(article), f"{path}:{begun}")
                article, begun = [pending], number - 1
            elif begun:
                article.append(pending)
            else:
                raise DataError(_no_title(path, number - 1))
            previous, pending = pending, None
        if not previous.strip() and _TITLE.fullmatch(line):
            pending = line
            continue
        if begun:
            article.append(line)
        elif line.strip():
            raise DataError(_no_title(path, number))
        previous = line
    if pending is not None:
        article.append(pending)
    if begun:
        yield Document("".join(article), f"{path}:{begun}")


def _lines(path: Path, reading: Reading) -> Iterator[tuple[int, str]]:
    """Numbered lines, with their ends."""
    try:
        blocks = Hashed(path, reading)
        try:
            for number, line in enumerate(lines(blocks, str(path)), 1):
                try:
                    yield number, line.decode() + "\n"
                except UnicodeDecodeError as error:
                    raise DataError(f"{path}:{number}: not UTF-8 at byte {error.start}") from None
            reading.sources[str(path)] = blocks.sha256()
        finally:
            blocks.close()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _no_title(path: Path, number: int) -> str:
    return (
        f"{path}:{number}: text before the first article; a line like ' = Title = ' between blank "
        "lines is wanted"
    )
