"""Numbers about learned kernels: which belong together, and how far each head reaches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_patches.analysis.aggregate import WINDOW, series_label
from megatron_patches.analysis.layout import ABSENT, Cell, Table
from megatron_patches.analysis.rows import KernelRow, RowError, canonical

# exp(-2) = 0.135: KERPLE's appendix A.5 takes a head to end where the bias falls below this.
THRESHOLD = -2.0
QUANTILES = (("shortest", 0.0), ("25%", 0.25), ("median", 0.5), ("75%", 0.75), ("longest", 1.0))
UNEVEN = (
    "some files lack the exact search: their heads are taken to end at the next distance sampled "
    "(8 an octave); `eval.py --kernels` writes them anew"
)


def effective_length(
    distances: Sequence[int], bias: Sequence[float], threshold: float = THRESHOLD
) -> int | None:
    """The smallest listed distance, in tokens, whose bias is below ``threshold``; None if none is.

    KERPLE (arXiv 2205.09921), appendix A.5, per head. Exact when ``distances`` (ascending) holds
    every integer up to the crossing; on a sparser list the result is the next listed distance.
    ValueError when the two differ in length or the distances do not ascend.
    """
    if len(distances) != len(bias):
        raise ValueError(f"{len(distances)} distances but {len(bias)} bias values")
    if any(a >= b for a, b in zip(distances, distances[1:], strict=False)):
        raise ValueError("distances do not ascend")
    below = (d for d, value in zip(distances, bias, strict=True) if value < threshold)
    return next(below, None)


def reach(row: KernelRow) -> int | None:
    """Effective length of one head in tokens: the one searched at every distance where the row has
    it, else from its sampled distances. None where the bias never falls below THRESHOLD."""
    if row.bias is None:
        return None
    if row.searched_to is not None:
        return row.effective_length
    return effective_length(row.distances, row.bias)


def farthest(row: KernelRow) -> int:
    """The longest distance at which ``reach`` looked, in tokens."""
    return row.distances[-1] if row.searched_to is None else row.searched_to


def last_kernels(rows: Iterable[KernelRow]) -> list[KernelRow]:
    """The kernels of the last step of each run, one a head, those with neither part left out.

    RowError when two rows of one head differ: they come from two runs whose rows do not say what
    tells them apart.
    """
    found: dict[tuple[object, ...], KernelRow] = {}
    for row in rows:
        if row.bias is None and row.weight is None:
            continue
        key = (*_run(row), row.step, row.layer, row.head)
        before = found.get(key)
        if before is not None and (before.bias, before.weight) != (row.bias, row.weight):
            raise RowError(
                f"{series_label(row)}, {row.dataset}, seed {row.seed}, step {row.step}, head "
                f"{row.head}: two different kernels; rows without train_length and options cannot "
                "be told apart: write them anew (eval.py --kernels), or read one file at a time"
            )
        if before is None or before.searched_to is None:
            found[key] = row
    last: dict[tuple[object, ...], int] = {}
    for row in found.values():
        last[_run(row)] = max(row.step, last.get(_run(row), 0))
    return [row for row in found.values() if row.step == last[_run(row)]]


def _run(row: KernelRow) -> tuple[object, ...]:
    # The window limits attention, not the kernel: a windowed evaluation writes the same one.
    options = {name: value for name, value in row.options.items() if name != WINDOW}
    return row.method, canonical(options), row.dataset, row.train_length, row.seed


def kernel_sets(rows: Iterable[KernelRow]) -> dict[tuple[str, int | None], list[KernelRow]]:
    """``last_kernels`` by data set and training length (None: the rows do not say), sorted."""
    sets: dict[tuple[str, int | None], list[KernelRow]] = {}
    for row in last_kernels(rows):
        sets.setdefault((row.dataset, row.train_length), []).append(row)
    return dict(sorted(sets.items(), key=lambda item: (item[0][0], item[0][1] or 0)))


def reaches(rows: Iterable[KernelRow]) -> dict[str, dict[int, list[int | None]]]:
    """Label -> seed -> effective length of every head (and layer), of the rows that have a bias."""
    found: dict[str, dict[int, list[int | None]]] = {}
    for row in sorted(last_kernels(rows), key=lambda row: series_label(row, window=False)):
        if row.bias is not None:
            label = series_label(row, window=False)
            found.setdefault(label, {}).setdefault(row.seed, []).append(reach(row))
    return found


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


def reach_table(rows: Iterable[KernelRow]) -> Table:
    """Quantiles of the effective length over heads and seeds, a line for each method and data set.

    Methods whose kernel is only a weight have no effective length and are not there. RowError when
    no row has a bias.
    """
    lines: list[tuple[str, tuple[Cell, ...]]] = []
    sampled = False
    limits: set[int] = set()
    for (dataset, length), kernels in kernel_sets(rows).items():
        biased = [row for row in kernels if row.bias is not None]
        sampled |= any(row.searched_to is None for row in biased)
        limits |= {farthest(row) for row in biased}
        trained = "" if length is None else f", trained on {length}"
        for label, seeds in reaches(biased).items():
            heads = [value for values in seeds.values() for value in values]
            lines.append((f"{label}, {dataset}{trained}", _cells(heads, len(seeds))))
    if not lines:
        raise RowError("no learned bias: nothing has an effective length")
    where = " / ".join(f"{limit:,}" for limit in sorted(limits))
    return Table(
        title="Effective length of heads in tokens",
        corner="method, data set",
        columns=("seeds", "heads", "endless", *(name for name, _ in QUANTILES)),
        rows=tuple(lines),
        header=(
            f"smallest distance with bias < {THRESHOLD:g} (KERPLE, appendix A.5), over the heads of "
            f"all seeds; endless: not below it up to {where} tokens",
        ),
        notes=(UNEVEN,) if sampled else (),
    )


def _cells(heads: Sequence[int | None], seeds: int) -> tuple[Cell, ...]:
    counts = (seeds, len(heads), sum(value is None for value in heads))
    cells = [Cell(str(count), mean=float(count)) for count in counts]
    for _, share in QUANTILES:
        value = quantile(heads, share)
        shown = Cell(ABSENT) if value is None else Cell(f"{value:,}", mean=float(value))
        cells.append(shown)
    return tuple(cells)
