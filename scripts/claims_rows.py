"""Numbers from the rows in results/, for claims.py: of one text, of models trained on 512 tokens."""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

from megatron_patches.analysis.aggregate import collect  # noqa: E402
from megatron_patches.analysis.early import SIDE_BY_SIDE, SLIDING  # noqa: E402
from megatron_patches.analysis.published import query, read_published  # noqa: E402
from megatron_patches.analysis.retrieval_rows import (  # noqa: E402
    RetrievalRow,
    latest_retrieval,
    read_retrieval,
)
from megatron_patches.analysis.rows import read_rows  # noqa: E402
from megatron_patches.analysis.statistics import paired_test  # noqa: E402
from megatron_patches.analysis.training_rows import TrainingRow, read_training  # noqa: E402

RESULTS = ROOT / "results"
MAIN = ("cpu_mini", "cpu_zoo")
FARTHEST = ("cpu_mini_far", "cpu_zoo_far")
WINDOWED = ("cpu_mini_position",)
BLOCKS = ("cpu_mini", "cpu_mini_blocks")
BLOCKWISE = "window blockwise:256"
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FAR = 16384
SEEDS = (1234, 1235, 1236)
FIRST_TWO, THIRD = SEEDS[:2], SEEDS[2]
BACK = (0.0, 0.25)  # depths that lie three quarters of the window away, or more


@functools.cache
def _scored(studies: tuple[str, ...], protocol: str) -> dict[tuple[str, int], dict[int, float]]:
    """(label, length) -> seed -> perplexity."""
    rows = [
        row
        for study in studies
        for row in read_rows(RESULTS / study / "rows.jsonl")
        if (row.train_length, row.protocol) == (512, protocol)
    ]
    series = collect(rows)
    return {(label, n): g.perplexities for label, by in series.items() for n, g in by.items()}


def ppl(
    label: str, length: int, *studies: str, seed: int | None = None, protocol: str = SIDE_BY_SIDE
) -> float:
    """Perplexity of one seed, or the mean over all."""
    found = _scored(studies or MAIN, protocol)[label, length]
    return statistics.mean(found.values()) if seed is None else found[seed]


def above(label: str, other: str, length: int, *studies: str, seed: int | None = None) -> float:
    """How much higher a perplexity is than another, as a share of that."""
    return ppl(label, length, *studies, seed=seed) / ppl(other, length, *studies, seed=seed) - 1


def nats(
    label: str, other: str, length: int, *studies: str, protocol: str = SIDE_BY_SIDE
) -> list[float]:
    """Loss minus that of another label, for each seed that both have."""
    found = _scored(studies or MAIN, protocol)
    ours, theirs = found[label, length], found[other, length]
    return [math.log(ours[seed] / theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def rise(label: str, to: int, *studies: str, sliding: bool = False) -> float:
    """Nats a token by which the loss at `to` lies above that at 512, mean over seeds."""
    found = _scored(studies or MAIN, SLIDING if sliding else SIDE_BY_SIDE)
    return statistics.mean(
        math.log(found[label, to][seed] / value) for seed, value in found[label, 512].items()
    )


def span(values: Iterable[float]) -> tuple[float, float]:
    """The least and the greatest."""
    listed = list(values)
    return min(listed), max(listed)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% of the mean, over seeds."""
    found = paired_test(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0)).interval
    assert found is not None
    return found


def words(value: float) -> str:
    """The nearest whole number as a word."""
    return ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"][
        round(value)
    ]


def at_most(values: Iterable[float], digits: int) -> float:
    """The least number of so many decimals that no value exceeds in size."""
    return float(math.ceil(max(map(abs, values)) * 10**digits) / 10**digits)


@functools.cache
def _asked() -> tuple[RetrievalRow, ...]:
    files = [RESULTS / f"{study}_retrieval" / "retrieval.jsonl" for study in MAIN]
    return tuple(row for row in latest_retrieval(read_retrieval(files)) if row.status == "ok")


def answers(
    method: str, source: str, length: int, seed: int, depths: tuple[float, ...] = ()
) -> list[RetrievalRow]:
    """The cells of a source of needles (digits, random, text), one a depth."""
    cell = (method, source, length, seed)
    return [
        row
        for row in _asked()
        if (row.method, row.source, row.eval_length, row.seed) == cell
        and (not depths or row.depth in depths)
    ]


def gain(method: str, source: str, length: int, seed: int, depths: tuple[float, ...] = ()) -> float:
    """Nats an answer token, mean over the depths."""
    return _mean(r.gain for r in answers(method, source, length, seed, depths))


def right(method: str, source: str, length: int, seed: int) -> float:
    """Share of the answer's tokens that are the likeliest ones, mean over the depths."""
    return _mean(r.token_accuracy for r in answers(method, source, length, seed))


def _mean(scores: Iterable[float | None]) -> float:
    """Of cells that were scored; every row that is "ok" has its scores."""
    return statistics.mean(score for score in scores if score is not None)


@functools.cache
def _trained() -> dict[tuple[str, int], TrainingRow]:
    files = [RESULTS / study / "training.jsonl" for study in MAIN]
    return {(r.method, r.seed): r for r in read_training(files) if r.train_length == 512}


def train_loss(method: str, seed: int, step: int) -> float:
    """As logged at this step: the mean over the steps since the log before."""
    row = _trained()[method, seed]
    return row.lm_loss[row.iterations.index(step)]


def published(length: int) -> list[float]:
    """How much higher ALiBi lies than KERPLE-log in KERPLE's Table 3, as a share, for each text."""
    rows = query(
        read_published(RESULTS / "published.csv"),
        paper="KERPLE",
        table="Table 3",
        eval_length=length,
    )
    value = {(row.dataset, row.method): row.value or math.nan for row in rows}
    texts = {row.dataset for row in rows}
    return [value[text, "alibi"] / value[text, "kerple_log"] - 1 for text in texts]


def with_window(method: str, length: int = FAR) -> list[float]:
    """Nats by which a window of 512 tokens changes the loss, each seed."""
    narrow = f"{method}, window 512"
    return nats(narrow, method, length, *WINDOWED, protocol="position")


def farther(method: str, seed: int | None = None) -> float:
    """How much higher perplexity is at 65,536 tokens than at 16,384, as a share."""
    at = [ppl(method, length, *FARTHEST, seed=seed) for length in (65536, FAR)]
    return at[0] / at[1] - 1


def again(*methods: str, but: tuple[str, ...] = ()) -> list[float]:
    """Nats from the first models of the third seed to those trained again, at 16,384 tokens."""
    new, old = _scored(FARTHEST, SIDE_BY_SIDE), _scored(MAIN, SIDE_BY_SIDE)
    return [
        math.log(new[method, FAR][THIRD] / old[method, FAR][THIRD])
        for method in methods or (label for label, length in new if length == FAR)
        if THIRD in new[method, FAR] and method not in but
    ]


def others(*but: str) -> list[str]:
    """All methods that were asked with the third seed, without these."""
    return sorted({row.method for row in _asked() if row.seed == THIRD} - set(but))
