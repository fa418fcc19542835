"""How long a model takes to read: measured by length in finished runs, else scaled by operations."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log

from megatron_patches.analysis.retrieval_rows import RetrievalRow
from megatron_patches.analysis.rows import Row
from megatron_patches.config import Config
from megatron_patches.config.keys_own import block_of
from megatron_patches.studies.plan import Plan
from megatron_patches.studies.progress import WIDTH, rows_of
from megatron_patches.studies.run import Run
from megatron_patches.studies.texts import Library

# A training step is a forward and a backward pass, the latter about twice the work.
PASSES = 3
GPT2_ENTRIES = 50257

Place = tuple[int, int | str | None]  # tokens of a window, and which attention window


@dataclass(frozen=True)
class Speeds:
    """Tokens a second through one model in one process: `training` by length, `scoring` by place.

    `given` is a training speed that somebody named, for every length. `library` knows the vocabularies.
    """

    training: Mapping[Place, float]
    scoring: Mapping[Place, float]
    given: float | None = None
    library: Library = field(default_factory=Library)

    def train(self, run: Run) -> float | None:
        """Of the run's training; None before anything was measured."""
        place = (run.config.seq_length, run.config.sliding_window_width)
        return self.given or self._scaled(self.training, place, run)

    def score(self, run: Run, place: Place) -> float | None:
        """Of a forward pass at a place: as measured near it, else from the training's speed."""
        measured = self._scaled(self.scoring, place, run)
        trained = self.train(run)
        if measured is not None or trained is None:
            return measured
        own = (run.config.seq_length, run.config.sliding_window_width)
        return trained * PASSES * self._work(run, own) / self._work(run, place)

    def _scaled(self, measured: Mapping[Place, float], place: Place, run: Run) -> float | None:
        """The speed at a place, from the nearest length (of the same window if there is one)."""
        if not measured:
            return None
        length, window = place

        def distance(other: Place) -> tuple[bool, float]:
            return other[1] != window, abs(log(other[0] / length))

        nearest = min(measured, key=distance)
        return measured[nearest] * self._work(run, nearest) / self._work(run, place)

    def _work(self, run: Run, place: Place) -> float:
        text = self.library.text(run.config, "train")
        vocabulary = run.config.padded_vocab_size or (text and text.vocabulary)
        return operations(run.config, place, vocabulary or expected_vocabulary(run.config))


def expected_vocabulary(config: Config) -> int:
    """Rows of the embedding where the text is not prepared yet: as its corpus makes them by default.

    GPT-2's of a text that `data_prep` does not know. Padded as NeoX does.
    """
    from data_prep import corpora

    entries = GPT2_ENTRIES
    if config.dataset in corpora.names():
        entries = corpora.get(config.dataset).options.get("vocab_size", GPT2_ENTRIES)
    multiple = config.make_vocab_size_divisible_by * config.model_parallel_size
    return -(-entries // multiple) * multiple


def measured_speeds(plan: Plan, given: float | None = None) -> Speeds:
    """Medians over what is there: the logs of the runs, and the rows of the study's folder."""
    training: dict[Place, list[float]] = defaultdict(list)
    for run in plan.runs:
        log_file = run.folder / "log.jsonl"
        text = log_file.read_text(encoding="utf-8") if log_file.is_file() else ""
        found = re.findall(r'"tokens_per_second": ?([\d.e+]+)', text)
        if found:
            place = (run.config.seq_length, run.config.sliding_window_width)
            training[place].append(float(found[-1]))
    rows, retrieval = rows_of(plan.study)
    scoring: dict[Place, list[float]] = defaultdict(list)
    both: tuple[Row | RetrievalRow, ...] = (*rows, *retrieval)
    for row in both:
        # Every question is asked twice, and a row holds the seconds of both.
        windows = row.windows if isinstance(row, Row) else 2 * row.samples
        if row.status == "ok" and row.seconds > 0:
            place = (row.eval_length, row.options.get(WIDTH))
            scoring[place].append(windows * row.eval_length / row.seconds)
    return Speeds(_medians(training), _medians(scoring), given)


def _medians(found: Mapping[Place, list[float]]) -> dict[Place, float]:
    return {place: statistics.median(speeds) for place, speeds in found.items()}


def operations(config: Config, place: Place, vocabulary: int) -> float:
    """Multiplications and additions of a forward pass, a token, at a place.

    Twice the weights of the matrices, and in each layer 4 x width for every key that a token sees:
    half the window on average, or those within the attention window.
    """
    length, window = place
    width = config.hidden_size
    matrices = config.num_layers * (4 * width * width + 2 * width * config.intermediate_size)
    matrices += width * vocabulary
    keys = length / 2
    block = block_of(window)
    if block is not None and block < length:
        # Half its own block and, from the second block on, the whole one before.
        keys = block / 2 + block * (1 - block / length)
    elif isinstance(window, int) and window < length:
        keys = window - window * window / (2 * length)
    return 2 * matrices + 4 * config.num_layers * width * keys
