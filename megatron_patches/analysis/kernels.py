"""Numbers about learned kernels: which belong together, and how far each head reaches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_patches.analysis.aggregate import WINDOW, series_label
from megatron_patches.analysis.rows import MAX_SIZE_RATIO, KernelRow, RowError, canonical

# exp(-2) = 0.135: KERPLE's appendix A.5 takes a head to end where the bias falls below this. Its
# biases are 0 at distance 0. Others are not, and softmax ignores what a whole row has in common, so
# that the fall from distance 0 is what counts.
THRESHOLD = -2.0
DEFINED = (
    "effective length: smallest distance d with bias(d) - bias(0) < {threshold:g}, after KERPLE, "
    "appendix A.5"
)
WEIGHT_IGNORED = "effective length of the bias alone, the weight is not counted: "
UNEVEN = (
    "some files lack the exact search: their heads are taken to end at the next distance sampled "
    "(8 an octave); `eval.py --kernels` writes them anew"
)


class KernelSet(NamedTuple):
    """What kernels of one figure have in common; ``size`` counts up from the smallest models.

    ``train_length`` is in tokens, None where the rows do not say; ``step`` is that of the training.
    """

    dataset: str
    train_length: int | None
    step: int
    size: int


def effective_length(
    distances: Sequence[int], bias: Sequence[float], threshold: float = THRESHOLD
) -> int | None:
    """The smallest listed distance, in tokens, at which the bias is more than ``-threshold`` below
    that at the first one; None where there is none.

    KERPLE (arXiv 2205.09921), appendix A.5, per head. Exact when ``distances`` (ascending) holds
    every integer from 0 to the crossing; on a sparser list the result is the next listed distance.
    ValueError when the two differ in length or the distances do not ascend.
    """
    if len(distances) != len(bias):
        raise ValueError(f"{len(distances)} distances but {len(bias)} bias values")
    if any(a >= b for a, b in zip(distances, distances[1:], strict=False)):
        raise ValueError("distances do not ascend")
    pairs = zip(distances, bias, strict=True)
    return next((d for d, value in pairs if value - bias[0] < threshold), None)


def exact(row: KernelRow) -> bool:
    """Whether the row's own effective length was searched at every distance, as defined here.

    Rows without ``config_sha`` took the bias as it is: the same where it is 0 at distance 0.
    """
    if row.searched_to is None or row.bias is None:
        return False
    return row.config_sha is not None or row.bias[0] == 0


def reach(row: KernelRow) -> int | None:
    """Effective length of one head in tokens: the exact one where the row has it, else from its
    sampled distances. None where the bias never falls so far."""
    if row.bias is None:
        return None
    return row.effective_length if exact(row) else effective_length(row.distances, row.bias)


def farthest(row: KernelRow) -> int:
    """The longest distance at which ``reach`` looked, in tokens."""
    return row.searched_to if exact(row) and row.searched_to is not None else row.distances[-1]


def extent(distances: Sequence[int], values: Sequence[float], *, additive: bool) -> float:
    """How much attention a head can spread over distances: its kernel's integral, in tokens.

    The integral (trapezoids between the listed distances) of exp(bias - its highest), or of the
    weight divided by its highest.
    """
    top = max(values)
    if not additive and top <= 0:
        return 0.0
    shares = [math.exp(value - top) if additive else value / top for value in values]
    points = list(zip(distances, shares, strict=True))
    return math.fsum(
        (b - a) * (x + y) / 2 for (a, x), (b, y) in zip(points, points[1:], strict=False)
    )


def distinct_kernels(rows: Iterable[KernelRow]) -> list[KernelRow]:
    """The kernels, one a head, run and step, those with neither part left out.

    A row without ``config_sha`` that repeats one with it is left out, too. RowError when two rows of
    one head differ: they come from two runs whose rows do not say what tells them apart.
    """
    found: dict[tuple[object, ...], KernelRow] = {}
    told: dict[tuple[object, ...], list[KernelRow]] = {}
    # Rows that name their configuration first: an older copy of one of them is recognized.
    for row in sorted(rows, key=lambda row: row.config_sha is None):
        if row.bias is None and row.weight is None:
            continue
        head = (*_run(row), row.step, row.layer, row.head)
        if row.config_sha is None and any(_same(row, other) for other in told.get(head, ())):
            continue
        key = (*head, row.config_sha, row.model_parameters)
        before = found.get(key)
        if before is not None and not _same(before, row):
            raise RowError(
                f"{series_label(row)}, {row.dataset}, seed {row.seed}, step {row.step}, head "
                f"{row.head}: two different kernels; rows without config_sha, train_length and "
                "options cannot be told apart: write them anew (eval.py --kernels), or read one file "
                "at a time"
            )
        if before is None or before.searched_to is None:
            found[key] = row
            if row.config_sha is not None:
                told.setdefault(head, []).append(row)
    return list(found.values())


def _same(row: KernelRow, other: KernelRow) -> bool:
    return (row.bias, row.weight) == (other.bias, other.weight)


def _run(row: KernelRow) -> tuple[object, ...]:
    # The window limits attention, not the kernel: a windowed evaluation writes the same one.
    options = {name: value for name, value in row.options.items() if name != WINDOW}
    return row.method, canonical(options), row.dataset, row.train_length, row.seed


def kernel_sets(rows: Iterable[KernelRow]) -> dict[KernelSet, list[KernelRow]]:
    """``distinct_kernels`` by data set, training length, step and size of the model, sorted.

    Models whose sizes differ by more than MAX_SIZE_RATIO are in sets of their own.
    """
    sets: dict[KernelSet, list[KernelRow]] = {}
    least: dict[KernelSet, int] = {}
    for row in sorted(distinct_kernels(rows), key=lambda row: row.model_parameters or 0):
        key, size = KernelSet(row.dataset, row.train_length, row.step, 0), row.model_parameters
        while size is not None and size > MAX_SIZE_RATIO * least.setdefault(key, size):
            key = key._replace(size=key.size + 1)
        sets.setdefault(key, []).append(row)
    return dict(sorted(sets.items(), key=lambda item: (item[0][0], item[0][1] or 0, item[0][2:])))


def described(sets: Iterable[KernelSet]) -> dict[KernelSet, str]:
    """Words for each set: ``books, trained on 512``, with the step and the size where they tell."""
    sets = list(sets)
    words = {}
    for key in sets:
        own = [other for other in sets if other[:2] == key[:2]]
        text = key.dataset + (
            "" if key.train_length is None else f", trained on {key.train_length}"
        )
        text += f", step {key.step}" if len({other.step for other in own}) > 1 else ""
        sizes = {other.size for other in own if other.step == key.step}
        words[key] = text + (f", size {key.size + 1}" if len(sizes) > 1 else "")
    return words


def one_set(rows: Iterable[KernelRow]) -> tuple[KernelSet, list[KernelRow]]:
    """The only set of these rows; RowError, with names, for several or for two runs of one label."""
    sets = kernel_sets(rows)
    if not sets:
        raise RowError("no kernels to draw")
    if len(sets) > 1:
        raise RowError(
            "kernels of several data sets, training lengths, steps or sizes in one figure: "
            + "; ".join(
                f"{key.dataset}, trained on {key.train_length}, step {key.step}" for key in sets
            )
        )
    ((key, own),) = sets.items()
    check_runs(own)
    return key, own


def check_runs(rows: Iterable[KernelRow]) -> None:
    """RowError, with names, when one label and seed has kernels of several steps or configurations."""
    found: dict[tuple[str, int], tuple[object, ...]] = {}
    for row in rows:
        label = series_label(row, window=False)
        own = (row.step, row.config_sha or "unknown", row.model_parameters)
        before = found.setdefault((label, row.seed), own)
        if before != own:
            shown = " and ".join(f"step {step}, config_sha {sha}" for step, sha, _ in (before, own))
            raise RowError(
                f"{label}, {row.dataset}, seed {row.seed}: kernels of two runs ({shown}) in one line; "
                "choose one with --where config_sha=... or step=..., or read one file at a time"
            )


def reaches(rows: Iterable[KernelRow]) -> dict[str, dict[int, list[int | None]]]:
    """Label -> seed -> effective length of every head (and layer), of the rows that have a bias.

    RowError: see ``check_runs``.
    """
    found: dict[str, dict[int, list[int | None]]] = {}
    biased = [row for row in distinct_kernels(rows) if row.bias is not None]
    check_runs(biased)
    for row in sorted(biased, key=lambda row: series_label(row, window=False)):
        label = series_label(row, window=False)
        found.setdefault(label, {}).setdefault(row.seed, []).append(reach(row))
    return found
