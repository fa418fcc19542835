"""The early-token effect: the same model and text under windows side by side and under sliding ones.

Side by side, the first tokens of every window are predicted from little text, and the longer the
windows, the fewer such tokens there are: perplexity falls with length even where a model uses no text
beyond its training length. Sliding windows give every token but the first window's its full context, so
what is left of the gain there is gain from context (ALiBi, arXiv 2108.12409, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_patches.analysis.aggregate import (
    comparable_rows,
    configurations,
    only,
    provenance,
    series_label,
)
from megatron_patches.analysis.layout import ABSENT, Cell, Notes, Table, number_cell
from megatron_patches.analysis.rows import COMPARED_FIELDS, RERUN_TOLERANCE, Row, RowError
from megatron_patches.analysis.statistics import Summary, summarize

SIDE_BY_SIDE, SLIDING = "nonoverlap", "sliding"
COLUMNS = ("nonoverlap", "sliding", "early-token effect", "gain", "gain, sliding", "vanishes")
# The alignment of windows to the longest length is part of the fingerprint of nonoverlap rows.
MAY_DIFFER = {"protocol", "data"}


@dataclass(frozen=True)
class Pair:
    """Losses (nats per token) of one model over the same targets, under the two protocols."""

    label: str
    seed: int
    length: int
    side_by_side: float
    sliding: float


def pairs(rows: Iterable[Row]) -> tuple[list[Pair], list[str]]:
    """Every cell that both protocols have scored, and what one of them alone has.

    RowError when rows of one protocol may not meet, when the protocols differ in text, model or
    arithmetic, or when the targets of one are not among those of the other.
    """
    rows = list(rows)
    side, sliding = (
        _by_cell(comparable_rows(_of(rows, protocol))) for protocol in (SIDE_BY_SIDE, SLIDING)
    )
    _check_like(side, sliding)
    longest = max(length for _, _, _, length in side)
    found = []
    for key in sorted(side.keys() & sliding.keys()):
        first, second = side[key], sliding[key]
        if first.loss is None or second.loss is None:
            continue
        label, seed, _, length = key
        found.append(Pair(label, seed, length, first.loss, _same_targets(first, second, longest)))
    alone = [f"{k[0]}, seed {k[1]}, {k[3]}" for k in sorted(side.keys() ^ sliding.keys())]
    return found, alone


def _of(rows: Sequence[Row], protocol: str) -> list[Row]:
    chosen = [row for row in rows if row.protocol == protocol]
    if not chosen:
        there = ", ".join(sorted({row.protocol for row in rows})) or "nothing"
        raise RowError(
            f"no rows of protocol {protocol}: the early-token table needs both {SIDE_BY_SIDE} and "
            f"{SLIDING}; there is {there}"
        )
    return chosen


Cells = dict[tuple[str, int, str, int], Row]  # label, seed, configuration, length


def _by_cell(rows: Iterable[Row]) -> Cells:
    return {(series_label(r), r.seed, r.config_sha, r.eval_length): r for r in rows}


def _check_like(side: Cells, sliding: Cells) -> None:
    first, second = next(iter(side.values())), next(iter(sliding.values()))
    mixed = [
        f"{name} ({getattr(first, name)}, {getattr(second, name)})"
        for name in COMPARED_FIELDS
        if name not in MAY_DIFFER and getattr(first, name) != getattr(second, name)
    ]
    if mixed:
        raise RowError(f"{SIDE_BY_SIDE} and {SLIDING} rows differ in: {'; '.join(mixed)}")


def _same_targets(side: Row, sliding: Row, longest: int) -> float:
    """Loss of ``sliding`` over the targets of ``side``, which are the first of its own.

    Fingerprints cannot tell whether the text is the same, because that of ``side`` names the
    alignment of its windows. The first window can: it is the same computation under both.
    """
    where = f"{series_label(side)}, seed {side.seed}, length {side.eval_length}"
    a, b = side.window_losses[0], sliding.window_losses[0]
    if abs(a - b) > RERUN_TOLERANCE * max(a, b):
        raise RowError(
            f"{where}: the first window has loss {a!r} side by side and {b!r} sliding: not the same "
            "text or weights"
        )
    if not 0 <= sliding.tokens - side.tokens < longest:
        raise RowError(
            f"{where}: {side.tokens} tokens side by side and {sliding.tokens} sliding: not the same "
            "text (side by side leaves out less than the longest window)"
        )
    later = side.tokens - side.eval_length
    windows, rest = divmod(later, sliding.stride)
    if rest:
        raise RowError(
            f"{where}: stride {sliding.stride} does not divide the {later} tokens after the first "
            "window: score again with a stride that does, such as a power of two"
        )
    if windows >= sliding.windows:
        raise RowError(f"{where}: {sliding.windows} sliding windows are too few for that stride")
    moved = math.fsum(sliding.window_losses[1 : windows + 1])
    return (side.eval_length * b + sliding.stride * moved) / side.tokens


def early_table(rows: Iterable[Row], *, methods: Sequence[str] | None = None) -> Table:
    """Perplexity under both protocols, and how much of the gain from length one of them explains.

    A line for each method and length, mean ± std over seeds. ``early-token effect``: loss side by side
    minus sliding; ``gain``: loss at the training length (the shortest scored where that is not) minus
    loss; ``vanishes``: the share of the mean gain that is not there under sliding windows. RowError:
    see ``pairs``.
    """
    chosen = only(rows, methods)
    found, alone = pairs(chosen)
    if not found:
        raise RowError(f"no cell was scored under both {SIDE_BY_SIDE} and {SLIDING}")
    sides = [_of(chosen, protocol) for protocol in (SIDE_BY_SIDE, SLIDING)]
    lengths = {pair.length for pair in found}
    trained = chosen[0].train_length
    start = trained if trained in lengths else min(lengths)
    notes = Notes()
    groups: dict[tuple[str, int], list[Pair]] = {}
    for pair in found:
        groups.setdefault((pair.label, pair.length), []).append(pair)
    base = {(p.label, p.seed): p for p in found if p.length == start}
    lines = [
        (f"{label}, {length}", _cells(group, base, start, notes))
        for (label, length), group in sorted(groups.items())
    ]
    stride = sides[1][0].stride
    return Table(
        title=f"Early-token effect, {chosen[0].dataset}",
        corner="method, length",
        columns=COLUMNS,
        rows=tuple(lines),
        header=(
            *(line for side in sides for line in provenance(side)[:1]),
            *provenance(sides[0])[1:],
            configurations(sides[0]),
            f"both over the targets of {SIDE_BY_SIDE}; the first window of each length has the same "
            "loss under both, so text and weights are the same",
            f"early-token effect: loss side by side minus sliding (stride {stride}), nats per token; "
            f"gain: loss at {start} minus loss; vanishes: share of the gain that sliding does not "
            "show",
        ),
        notes=(
            *notes.lines(),
            *([f"under one protocol only: {'; '.join(alone)}"] if alone else []),
        ),
    )


def _cells(
    group: Sequence[Pair], base: dict[tuple[str, int], Pair], start: int, notes: Notes
) -> tuple[Cell, ...]:
    side, sliding = (
        number_cell(summarize(math.exp(value) for value in values))
        for values in ([p.side_by_side for p in group], [p.sliding for p in group])
    )
    effect = _nats([p.side_by_side - p.sliding for p in group])
    if group[0].length == start:
        return side, sliding, effect, *(Cell(ABSENT),) * 3
    both = [(base[(p.label, p.seed)], p) for p in group if (p.label, p.seed) in base]
    if not both:
        mark = notes.mark(f"no gain: not scored at {start}")
        return side, sliding, effect, Cell(ABSENT, marks=(mark,)), *(Cell(ABSENT),) * 2
    gains = [first.side_by_side - p.side_by_side for first, p in both]
    left = [first.sliding - p.sliding for first, p in both]
    return side, sliding, effect, _nats(gains), _nats(left), _share(gains, left, notes)


def _nats(values: Sequence[float]) -> Cell:
    summary: Summary = summarize(values)
    spread = "" if summary.std is None else f"{summary.std:.4f}"
    return Cell(
        f"{summary.mean:+.4f}", spread, mean=summary.mean, std=summary.std, seeds=summary.count
    )


def _share(gains: Sequence[float], left: Sequence[float], notes: Notes) -> Cell:
    """1 - gain under sliding / gain side by side, of the means over seeds."""
    gain, kept = summarize(gains), summarize(left)
    # A share of next to nothing would say nothing, however many digits it had.
    error = 0.0 if gain.std is None else 2 * gain.std / math.sqrt(gain.count)
    if gain.mean <= error:
        mark = notes.mark("no gain side by side (not above twice its standard error over seeds)")
        return Cell(ABSENT, marks=(mark,))
    share = 1 - kept.mean / gain.mean
    return Cell(f"{100 * share:.0f}%", mean=share, seeds=gain.count)
