"""Differences of losses: each method against a reference, with what is known of their size.

Losses (nats per token) are compared, pair by pair: the same seed, the same windows. Their mean
difference is the logarithm of a ratio of perplexities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_patches.analysis.aggregate import collect, comparable_rows, series_label
from megatron_patches.analysis.published import REFERENCE
from megatron_patches.analysis.rows import Row, RowError
from megatron_patches.analysis.statistics import (
    PairedTest,
    block_means,
    bootstrap_interval,
    paired_test,
    summarize,
    text_error,
)
from megatron_patches.analysis.validate import SEEDED_WINDOWS

# Such rows say so in their message. Resampled as if each were text of its own, the windows of ten passes
# would give an interval narrower by a factor of sqrt(10).
SHARED = (
    "the windows come from several passes over one text, or repeat, so they are no independent draws: no "
    "statistics over text"
)


@dataclass(frozen=True)
class Difference:
    """``label`` minus the reference at one length, over the ``seeds`` that both have.

    ``test`` is None where there is no such seed. ``interval`` and ``text`` (the standard error) are
    over ``blocks`` samples of text; None where ``problem`` says why.
    """

    label: str
    length: int
    seeds: tuple[int, ...]
    test: PairedTest | None = None
    interval: tuple[float, float] | None = None
    spread: float | None = None  # over seeds
    text: float | None = None
    blocks: int = 0
    problem: str | None = None
    drawn: bool = False  # the seed of each run drew its windows


def differences(rows: Iterable[Row], reference: str = REFERENCE) -> list[Difference]:
    """Each label but ``reference`` at each length that it was asked for, scored or not.

    RowError when rows may not meet, or none of them is of ``reference``.
    """
    kept = comparable_rows(rows)
    series = collect(kept)
    if reference not in series:
        raise RowError(
            f"no rows of {reference} to compare with; --reference can be {', '.join(series)}"
        )
    cells: dict[tuple[str, int], dict[int, Row]] = {}
    for row in kept:
        if row.status == "ok":
            cells.setdefault((series_label(row), row.eval_length), {})[row.seed] = row
    longest = max(row.eval_length for row in kept)
    return [
        _difference(label, length, cells.get((label, length), {}), theirs, longest)
        for label, groups in series.items()
        for length in sorted(groups)
        if label != reference
        for theirs in [cells.get((reference, length), {})]
    ]


def _difference(
    label: str, length: int, ours: dict[int, Row], theirs: dict[int, Row], longest: int
) -> Difference:
    seeds = tuple(sorted(ours.keys() & theirs.keys()))
    if not seeds:
        return Difference(label, length, seeds)
    losses = [{seed: _loss(rows[seed]) for seed in seeds} for rows in (ours, theirs)]
    spread = summarize(losses[0][seed] - losses[1][seed] for seed in seeds).std
    drawn = ours[seeds[0]].protocol in SEEDED_WINDOWS
    found = Difference(label, length, seeds, paired_test(*losses), spread=spread, drawn=drawn)
    if drawn and any(rows[seed].message for rows in (ours, theirs) for seed in seeds):
        return replace(found, problem=SHARED)
    if not all(_means_agree(rows[seed]) for rows in (ours, theirs) for seed in seeds):
        return replace(found, problem="windows of unequal size: no statistics over text")
    # Windows that differ from seed to seed have no mean over seeds, and are drawn one by one.
    used = seeds[:1] if drawn else seeds
    block = 1 if drawn else block_windows(ours[seeds[0]], longest)
    first, second = (mean_windows([rows[seed] for seed in used]) for rows in (ours, theirs))
    interval = bootstrap_interval(first, second, block=block)
    moved = [a - b for a, b in zip(first, second, strict=True)]
    blocks = len(block_means(moved, block)[0])
    problem = None
    if interval is None:
        problem = "one block of text, or no spread over blocks: no bootstrap"
    elif drawn and len(seeds) > 1:
        problem = (
            f"of the windows of seed {used[0]} alone, where Δ loss is {summarize(moved).mean:+.4f}"
        )
    text = None if drawn and len(seeds) > 1 else text_error(moved, block)
    return replace(found, interval=interval, text=text, blocks=blocks, problem=problem)


def block_windows(row: Row, longest: int) -> int:
    """Consecutive windows of ``row`` that span ``longest`` tokens, so that all lengths share blocks."""
    return math.ceil(longest / row.stride)


def mean_windows(rows: Sequence[Row]) -> list[float]:
    """The loss of each window, mean over seeds; ValueError where they differ in number."""
    losses = [row.window_losses for row in rows]
    return [math.fsum(window) / len(losses) for window in zip(*losses, strict=True)]


def _loss(row: Row) -> float:
    assert row.loss is not None  # status is "ok"
    return row.loss


def _means_agree(row: Row) -> bool:
    """Whether every window counts alike: not under a protocol that scores unequal numbers."""
    mean = math.fsum(row.window_losses) / len(row.window_losses)
    return abs(mean - _loss(row)) <= 1e-5 * max(1.0, _loss(row))
