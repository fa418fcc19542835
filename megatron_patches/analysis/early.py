"""The early-token effect: the same model and text under windows side by side and under sliding ones.

Side by side, the first tokens of every window are predicted from little text, and the longer the
windows, the fewer such tokens there are: perplexity falls with length even where a model uses no text
beyond its training length. Sliding windows give every token but the first window's its full context, so
what is left of the gain there is gain from context (ALiBi, arXiv 2108.12409, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_patches.analysis.aggregate import (
    Group,
    Series,
    collect,
    comparable_rows,
    configurations,
    only,
    provenance,
    series_label,
)
from megatron_patches.analysis.cells import problem_cell, reasons, seed_line, short_marks
from megatron_patches.analysis.differences import block_windows
from megatron_patches.analysis.latest import RERUN_TOLERANCE
from megatron_patches.analysis.layout import ABSENT, Cell, Notes, Table, number_cell
from megatron_patches.analysis.rows import COMPARED_FIELDS, Row, RowError
from megatron_patches.analysis.statistics import (
    Summary,
    block_means,
    clearly_positive,
    summarize,
)

SIDE_BY_SIDE, SLIDING = "nonoverlap", "sliding"
COLUMNS = ("nonoverlap", "sliding", "early-token effect", "gain", "gain, sliding", "vanishes")
# The alignment of windows to the longest length is part of the fingerprint of nonoverlap rows.
MAY_DIFFER = {"protocol", "data"}


@dataclass(frozen=True)
class Pair:
    """Losses (nats per token) of one model over the same targets, under the two protocols.

    ``blocks`` are the losses side by side of consecutive blocks of text, each as long as the longest
    window of all.
    """

    label: str
    seed: int
    length: int
    side_by_side: float
    sliding: float
    blocks: tuple[float, ...]


def pairs(rows: Iterable[Row]) -> tuple[list[Pair], list[str]]:
    """Every cell that both protocols have scored, and what one of them alone has.

    RowError when rows of one protocol may not meet, when the protocols differ in text, model or
    arithmetic, when one label and seed has two configurations, or when the targets of one protocol
    are not among those of the other.
    """
    rows = list(rows)
    side, sliding = (
        _by_cell(comparable_rows(_of(rows, protocol))) for protocol in (SIDE_BY_SIDE, SLIDING)
    )
    _check_like(side, sliding)
    _check_one_model([*side, *sliding])
    longest = max(length for _, _, _, length in side)
    found = []
    for key in sorted(side.keys() & sliding.keys()):
        first, second = side[key], sliding[key]
        if first.loss is None or second.loss is None:
            continue
        label, seed, _, length = key
        kept = _same_targets(first, second, longest)
        blocks, _ = block_means(first.window_losses, block_windows(first, longest))
        found.append(Pair(label, seed, length, first.loss, kept, tuple(blocks)))
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


def _check_one_model(cells: Iterable[tuple[str, int, str, int]]) -> None:
    """A gain is between two lengths of one model; two of a name would be averaged as if seeds."""
    first: dict[tuple[str, int], str] = {}
    for label, seed, sha, _ in cells:
        before = first.setdefault((label, seed), sha)
        if before != sha:
            raise RowError(
                f"{label}, seed {seed}: results of two configurations ({before} and {sha}); choose "
                "one with config_sha"
            )


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
    loss; ``vanishes``: the share of the mean gain that is not there under sliding windows, where the
    gain is more than noise. Cells that were refused or failed have a line that says so. RowError: see
    ``pairs``.
    """
    chosen = only(rows, methods)
    found, alone = pairs(chosen)
    if not found:
        raise RowError(f"no cell was scored under both {SIDE_BY_SIDE} and {SLIDING}")
    sides = [_of(chosen, protocol) for protocol in (SIDE_BY_SIDE, SLIDING)]
    lengths = {pair.length for pair in found}
    trained = chosen[0].train_length
    start = trained if trained in lengths else min(lengths)
    lines, notes = _lines(found, [collect(side) for side in sides], start, chosen)
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
            seed_line(len({row.seed for row in chosen})),
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


def _lines(
    found: Sequence[Pair], series: Sequence[Series], start: int, rows: Sequence[Row]
) -> tuple[list[tuple[str, tuple[Cell, ...]]], Notes]:
    notes, expected = Notes(), len({row.seed for row in rows})
    groups: dict[tuple[str, int], list[Pair]] = {}
    for pair in found:
        groups.setdefault((pair.label, pair.length), []).append(pair)
    unscored = {
        (label, length)
        for one in series
        for label, by_length in one.items()
        for length, group in by_length.items()
        if group.problems
    }
    base = {(p.label, p.seed): p for p in found if p.length == start}
    lines = []
    for label, length in sorted(groups.keys() | unscored):
        both = [one.get(label, {}).get(length) for one in series]
        if (label, length) not in groups:
            lines.append((f"{label}, {length}", _no_cells(both, length, notes)))
            continue
        pairs_here = groups[label, length]
        causes = sorted({item for group in both for item in reasons(group, length)})
        short = short_marks(len(pairs_here), expected, causes, notes)
        first, *rest = _cells(pairs_here, base, start, notes)
        lines.append((f"{label}, {length}", (replace(first, marks=short), *rest)))
    return lines, notes


def _no_cells(both: Sequence[Group | None], length: int, notes: Notes) -> tuple[Cell, ...]:
    """What either protocol says of a cell that they have not both scored: no number."""
    told = [problem_cell(group, length, notes) for group in both]
    return *told, *(Cell(ABSENT),) * (len(COLUMNS) - len(told))


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
    marks = short_marks(len(both), len(group), [("not scored", f"the others at {start}")], notes)
    gain = replace(_nats(gains), marks=marks)
    return side, sliding, effect, gain, _nats(left), _share(both, gains, left, notes)


def _nats(values: Sequence[float]) -> Cell:
    summary: Summary = summarize(values)
    spread = "" if summary.std is None else f"{summary.std:.4f}"
    return Cell(
        f"{summary.mean:+.4f}", spread, mean=summary.mean, std=summary.std, seeds=summary.count
    )


def _share(
    both: Sequence[tuple[Pair, Pair]], gains: Sequence[float], left: Sequence[float], notes: Notes
) -> Cell:
    """1 - gain under sliding / gain side by side, of the means over seeds.

    A share of next to nothing would say nothing, however many digits it had: the gain has to lie
    above 0 over the seeds (where there are two or more) and over the blocks of text.
    """
    by_block = _gain_by_block(both)
    if len(by_block) < 2 and len(gains) < 2:
        mark = notes.mark("no share: with one seed and one block of text the gain has no error")
        return Cell(ABSENT, marks=(mark,))
    samples = [sample for sample in (gains, by_block) if len(sample) > 1]
    if not all(clearly_positive(sample) for sample in samples):
        mark = notes.mark(
            "no gain side by side beyond its noise (95% t-intervals over seeds and over blocks of text)"
        )
        return Cell(ABSENT, marks=(mark,))
    share = 1 - summarize(left).mean / summarize(gains).mean
    return Cell(f"{100 * share:.0f}%", mean=share, seeds=len(gains))


def _gain_by_block(both: Sequence[tuple[Pair, Pair]]) -> list[float]:
    """Gain side by side in each block of text, mean over seeds; none where the blocks differ."""
    if len({len(pair.blocks) for pair in (p for two in both for p in two)}) > 1:
        return []
    by_seed = [
        [a - b for a, b in zip(first.blocks, pair.blocks, strict=True)] for first, pair in both
    ]
    return [math.fsum(block) / len(block) for block in zip(*by_seed, strict=True)]
