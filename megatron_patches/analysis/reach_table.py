"""Effective lengths of heads in numbers: counts, quantiles and their table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_patches.analysis.aggregate import series_label
from megatron_patches.analysis.kernels import (
    DEFINED,
    THRESHOLD,
    UNEVEN,
    WEIGHT_IGNORED,
    described,
    exact,
    farthest,
    kernel_sets,
    reaches,
)
from megatron_patches.analysis.layout import ABSENT, Cell, Table
from megatron_patches.analysis.rows import KernelRow, RowError

QUANTILES = (("shortest", 0.0), ("25%", 0.25), ("median", 0.5), ("75%", 0.75), ("longest", 1.0))


def cumulative(lengths: Sequence[int | None], distance: int) -> int:
    """How many heads end at ``distance`` tokens or before."""
    return sum(length is not None and length <= distance for length in lengths)


def quantile(lengths: Sequence[int | None], share: float) -> int | None:
    """The smallest of the given lengths that at least ``share`` of the heads do not exceed.

    A head that never ends (None) counts as longer than all others.
    """
    ordered = sorted(math.inf if length is None else length for length in lengths)
    value = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
    return None if value == math.inf else int(value)


def reach_notes(rows: Iterable[KernelRow]) -> list[str]:
    """What has to be known of the effective lengths of these rows: inexact ones, ignored weights."""
    biased = [row for row in rows if row.bias is not None]
    both = {series_label(row, window=False) for row in biased if row.weight is not None}
    found = [WEIGHT_IGNORED + ", ".join(sorted(both))] if both else []
    return found + ([UNEVEN] if any(not exact(row) for row in biased) else [])


def reach_table(rows: Iterable[KernelRow]) -> Table:
    """Quantiles of the effective length over heads and seeds, a line for each method and set.

    Methods whose kernel is only a weight have no effective length and are not there. RowError when
    no row has a bias, or when a line would hold two runs of one label and seed.
    """
    lines: list[tuple[str, tuple[Cell, ...]]] = []
    sets = kernel_sets(row for row in rows if row.bias is not None)
    words = described(sets)
    for key, kernels in sets.items():
        for label, seeds in reaches(kernels).items():
            heads = [value for values in seeds.values() for value in values]
            lines.append((f"{label}, {words[key]}", _cells(heads, len(seeds))))
    if not lines:
        raise RowError("no learned bias: nothing has an effective length")
    biased = [row for kernels in sets.values() for row in kernels]
    where = " / ".join(f"{limit:,}" for limit in sorted({farthest(row) for row in biased}))
    return Table(
        title="Effective length of heads in tokens",
        corner="method, data set",
        columns=("seeds", "heads", "endless", *(name for name, _ in QUANTILES)),
        rows=tuple(lines),
        header=(
            f"{DEFINED.format(threshold=THRESHOLD)}, over the heads of all seeds; endless: never so "
            f"far below up to {where} tokens",
        ),
        notes=tuple(reach_notes(biased)),
    )


def _cells(heads: Sequence[int | None], seeds: int) -> tuple[Cell, ...]:
    counts = (seeds, len(heads), sum(value is None for value in heads))
    cells = [Cell(str(count), mean=float(count)) for count in counts]
    for _, share in QUANTILES:
        value = quantile(heads, share)
        shown = Cell(ABSENT) if value is None else Cell(f"{value:,}", mean=float(value))
        cells.append(shown)
    return tuple(cells)
