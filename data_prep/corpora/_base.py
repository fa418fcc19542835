"""The two kinds of corpus: made on this machine, or published and brought by the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.reading import Document, Reading


@dataclass(frozen=True)
class Fetched:
    """Documents, and what the sidecar should say of their origin."""

    documents: Iterable[Document]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class LocalCorpus:
    """Text that this machine has, or gets from a package registry by its ordinary client.

    ``sources``: name -> function that takes a scratch folder. The first is the default; another is
    used only when named (``--source``), since its text, and so every number, differs.
    ``options``: defaults that differ from those of ``jsonl``. ``identity``: what else decides the
    text and is known beforehand, so that a finished folder made from other text is noticed.
    """

    about: str
    licence: str
    sources: Mapping[str, Callable[[Path], Fetched]]
    options: Mapping[str, Any]
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedCorpus:
    """A corpus that is never downloaded here: what the user's own file is called and holds.

    ``files``: file name -> sha256, or None where no hash is published. ``where``: where copies can
    be had today, as far as is known. ``options``: defaults that differ from those of ``jsonl``.
    A corpus with files of its own kind has ``expand`` (inputs to files) and ``read`` (files to
    documents, as in `reading`); one with fixed splits has ``split_files``: file name -> split.
    """

    about: str
    files: Mapping[str, str | None]
    where: str
    format: str
    licence: str
    notes: str
    options: Mapping[str, Any] = field(default_factory=dict)
    expand: Callable[[Iterable[str | Path]], list[Path]] | None = None
    read: Callable[[Iterable[Path], Reading], Iterator[Document]] | None = None
    split_files: Mapping[str, str] = field(default_factory=dict)

    def describe(self, name: str) -> str:
        lines = [f"{name}: {self.about}. It is never downloaded; give your own copy by --input."]
        for file, sha256 in self.files.items():
            lines.append(f"  file     {file} (sha256 {sha256 or 'not published'})")
        lines += [
            f"  where    {self.where}",
            f"  format   {self.format}",
            f"  licence  {self.licence}",
            f"  notes    {self.notes}",
            f"  example  python -m data_prep {name} --input {next(iter(self.files))}",
        ]
        return "\n".join(lines)

    def split_of(self, document: Document) -> str:
        """The published split, by the file that the document's origin names."""
        file = Path(document.origin.rpartition(":")[0]).name
        return self.split_files[file]


# Small corpora share these: a small vocabulary learnt from the text, a split with a long enough
# held-out stream (17 windows of 16,384 tokens and more), and no document that fills a split.
SMALL = {
    "tokenizer": "train",
    "vocab_size": 1024,
    "split": "86,10,4",
    "min_characters": 500,
    "max_document_bytes": 250_000,
    "min_split_tokens": 16_385,
    "order": "hash",
}
