"""Which row of a cell counts, for every kind of row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar

from megatron_patches.analysis.jsonl import RowError

# A re-run on another kernel or machine moves the loss in the last digits only.
RERUN_TOLERANCE = 1e-4


class _Scored(Protocol):
    @property
    def loss(self) -> float | None: ...


S = TypeVar("S", bound=_Scored)


def latest(rows: Iterable[S], key: Callable[[S], Hashable], name: Callable[[S], str]) -> list[S]:
    """One row a ``key``: the last with a loss, or the last one where none has.

    Result files are append-only, so a cell that failed and was run again is there twice. Two losses
    of one cell that differ by more than RERUN_TOLERANCE (relative) raise RowError, which calls the
    cell by ``name``: one of them did not measure what it says.
    """
    kept: dict[Hashable, S] = {}
    for row in rows:
        before = kept.get(key(row))
        if before is not None and before.loss is not None:
            if row.loss is None:
                continue
            if abs(row.loss - before.loss) > RERUN_TOLERANCE * max(row.loss, before.loss):
                raise RowError(
                    f"two results for one cell ({name(row)}): loss {before.loss!r} and {row.loss!r}"
                )
        kept[key(row)] = row
    return list(kept.values())
