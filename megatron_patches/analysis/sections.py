"""Result files cut into sections: rows that may meet in one table, and where each came from."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_patches.analysis.aggregate import collect, comparable_rows
from megatron_patches.analysis.jsonl import read_objects
from megatron_patches.analysis.rows import COMPARED_FIELDS, WHOLE_WINDOW, Row, RowError


@dataclass(frozen=True)
class Source:
    """One result file: the name to show, and its rows."""

    name: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Section:
    """Rows of one question, one a cell, and their files; ``problem``: why they may not meet."""

    rows: list[Row]
    files: list[str]
    problem: str | None = None

    @property
    def title(self) -> str:
        """What tells this section from others of the page."""
        row = self.rows[0]
        parts = [row.dataset, f"protocol {row.protocol}"]
        parts += [] if row.last_k is None else [f"last {row.last_k} tokens"]
        parts += ["documents isolated"] if row.documents_isolated else []
        trained = f"trained on {row.train_length} tokens for {row.step} steps"
        return ", ".join([*parts, f"split {row.split}", trained])


def cut(sources: Iterable[Source]) -> list[Section]:
    """The sections of all files, sorted by what was measured.

    Rows of several files meet where they may. Where they may not (two configurations of one
    label, other windows), each file is a section of its own, and a file that cannot be shown even
    alone is a section with a ``problem``, so that no row disappears.
    """
    groups: dict[Question, dict[str, list[Row]]] = {}
    for source in sources:
        for row in source.rows:
            groups.setdefault(_question(row), {}).setdefault(source.name, []).append(row)
    found = []
    for _, by_file in sorted(groups.items()):
        together = _section([row for rows in by_file.values() for row in rows], list(by_file))
        if together.problem is None or len(by_file) == 1:
            found.append(together)
        else:
            found += [_section(rows, [name]) for name, rows in by_file.items()]
    return found


def _section(rows: list[Row], files: list[str]) -> Section:
    try:
        kept = comparable_rows(rows)
        collect(kept)
    except RowError as error:
        return Section(rows, files, str(error))
    return Section(kept, files)


def alike(rows: Iterable[Row], ignored: Collection[str] = ()) -> list[list[Row]]:
    """Rows by what was measured, sorted; the fields ``ignored`` do not set them apart."""
    groups: dict[Question, list[Row]] = {}
    for row in rows:
        groups.setdefault(_question(row, ignored), []).append(row)
    return [groups[key] for key in sorted(groups)]


Question = tuple[tuple[int, str], ...]  # sorts numbers as numbers


def _question(row: Row, ignored: Collection[str] = ()) -> Question:
    names = [name for name in COMPARED_FIELDS if name not in ignored]
    names += [] if "protocol" in ignored or row.protocol in WHOLE_WINDOW else ["stride"]
    values = [getattr(row, name) for name in names]
    return tuple((v, "") if isinstance(v, int) else (0, str(v or "")) for v in values)


@dataclass(frozen=True)
class Found:
    """Result files by what they hold."""

    rows: list[Path] = field(default_factory=list)
    kernels: list[Path] = field(default_factory=list)
    training: list[Path] = field(default_factory=list)
    retrieval: list[Path] = field(default_factory=list)
    failed: list[Path] = field(default_factory=list)


# Fields that the first line of a file of each kind has, and no other kind.
_KINDS = {
    "rows": {"eval_length", "protocol", "loss"},
    "kernels": {"head", "distances"},
    "training": {"iterations", "lm_loss"},
    "retrieval": {"task", "depth", "gain"},
    "failed": {"exit_code", "step", "command"},
}


def find_files(folder: str | os.PathLike[str]) -> Found:
    """The ``.jsonl`` files of ``folder``, told apart by their first line.

    Files of other things (benchmarks) are left out. RowError: see ``jsonl.read_objects``.
    """
    found = Found()
    for path in sorted(Path(folder).rglob("*.jsonl")):
        first = next((item for _, item in read_objects(path)), {})
        for kind, keys in _KINDS.items():
            if keys <= first.keys():
                getattr(found, kind).append(path)
    return found
