"""Which text a protocol reads: one stretch for all lengths, or windows drawn as the authors of KERPLE did.

Both kinds answer the same questions: `cut` tells their text from other parts of the same files,
`stride_at` what a row reports, and `at` gives the tokens and windows of one length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset
from megatron_patches.analysis.cuts import PAPER_WINDOWS, fixed_cut, paper_cut
from megatron_patches.config import Config
from megatron_patches.config.keys_own import one_spelling
from megatron_patches.standalone.data import (
    Blend,
    Samples,
    build_samples,
    check_entries,
    sources,
    token_stream,
)
from megatron_patches.standalone.windows import Plan, Window, check_settings

# Of the authors' evaluation (`ex_eval.yml`): the key from which NeoX computes where in the validation
# windows a run of so many steps goes on.
PAPER_EVAL_INTERVAL = 1000


@dataclass(frozen=True)
class Request:
    """What to evaluate. Lengths, `stride`, `last_k` and `window` in tokens.

    `max_tokens` None is the whole split. `window` is a `sliding_window_width` in NeoX's sense, or
    `blockwise:b`, used instead of the trained one; `position_options` are options of the position
    method in the same sense. `paper_windows` None is 320.
    """

    lengths: tuple[int, ...]
    protocol: str = "nonoverlap"
    split: str = "valid"
    stride: int | None = None
    last_k: int | None = None
    batch_size: int | None = None
    max_tokens: int | None = None
    window: int | str | None = None
    paper_windows: int | None = None
    position_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that the protocol lacks or does not have."""
        # A length that is named twice is one cell.
        object.__setattr__(self, "lengths", tuple(dict.fromkeys(self.lengths)))
        object.__setattr__(self, "position_options", one_spelling(dict(self.position_options)))
        given = ("stride", "last_k", "max_tokens", "paper_windows")
        check_settings(self.protocol, {name: getattr(self, name) for name in given})


@dataclass(frozen=True)
class Reading:
    """`windows` lie in `tokens` (int `[T]`); `note` is what a row has to say about them."""

    tokens: np.ndarray
    windows: list[Window]
    note: str | None = None


class Text(Protocol):
    datasets: list[IndexedDataset]
    cut: str

    def stride_at(self, length: int) -> int: ...

    def at(self, length: int) -> Reading: ...


def open_text(config: Config, request: Request, step: int, vocabulary: int) -> Text:
    """The text of a request, for a model of `vocabulary` entries after `step` training steps.

    Raises DataError when its tokens are not the model's, ConfigError when there is none, ValueError
    for a question that cannot be asked.
    """
    kind = DrawnText if request.protocol == "paper" else FixedText
    return kind(config, request, step, vocabulary)


class FixedText:
    """The split in file order, the same tokens for every length, seed and method."""

    def __init__(self, config: Config, request: Request, step: int, vocabulary: int) -> None:
        tokens, self.datasets = token_stream(config, request.split)
        self.tokens = tokens[: request.max_tokens]
        settings = (request.stride, request.last_k)
        self.plan = Plan(request.protocol, len(self.tokens), request.lengths, *settings)
        check_entries(self.tokens, vocabulary, _named(self.datasets))
        part = _part(config, request.split)
        self.cut = fixed_cut(part, request.protocol, request.max_tokens, self.plan.longest)

    def stride_at(self, length: int) -> int:
        # Where no length fits into the text, there is no stride; rows want one.
        return self.plan.stride_at(length) or 1

    def at(self, length: int) -> Reading:
        return Reading(self.tokens, self.plan.windows(length))


class DrawnText:
    """Windows as the released KERPLE evaluation reads them, on one GPU; `docs/evaluation.md` has it all.

    At each length the split is cut into windows of that length anew, in NeoX's shuffled order for a
    run that asks for `paper_windows` of them with the run's seed. The test split is read from the first
    window of that order. For the validation split NeoX skips those that it takes for read in training:
    `paper_windows` for every `eval_interval` steps behind the model, modulo their number.
    """

    def __init__(self, config: Config, request: Request, step: int, vocabulary: int) -> None:
        self.config, self.split, self.vocabulary = config, request.split, vocabulary
        self.count = request.paper_windows or PAPER_WINDOWS
        self.skipped = step // PAPER_EVAL_INTERVAL * self.count if self.split == "valid" else 0
        self.datasets = [IndexedDataset(prefix) for prefix, _ in sources(config, self.split)]
        self.cut = paper_cut(_part(config, self.split), self.count)

    def stride_at(self, length: int) -> int:
        return length

    def at(self, length: int) -> Reading:
        """Raises DataError where the split is shorter than two windows, or not of this vocabulary."""
        samples = build_samples(self.config, self.split, length, self.count)
        if not len(samples):
            raise DataError(
                f"{self.datasets[0].prefix}: the split gives no second window of {length} tokens, and "
                "NeoX never reaches the last one: ask for more windows, or prepare more held-out text"
            )
        chosen = self.numbers(len(samples))
        tokens = np.concatenate([samples[number] for number in chosen])
        check_entries(tokens, self.vocabulary, _named(self.datasets))
        step = length + 1  # a window and its last label
        windows = [Window(place * step, length, 0) for place in range(self.count)]
        return Reading(tokens, windows, _note(samples, chosen[0], self.count))

    def numbers(self, available: int) -> list[int]:
        """Which windows of the shuffled order are read, in order.

        At the end of the order the authors' script stops with an error; here it starts again.
        """
        return [(self.skipped + number) % available for number in range(self.count)]


def _note(samples: Samples, begin: int, count: int) -> str | None:
    """What a reader of the row must know of a short split, where windows share text, or even repeat."""
    orders = samples.orders if isinstance(samples, Blend) else [samples]
    passes = max(order.epochs for order in orders)
    left = len(samples) - begin
    parts = []
    if passes > 1:
        parts.append(
            f"the split fills fewer than {count} windows: {passes} shuffled passes over it"
        )
    if left < count:
        parts.append(
            f"the order starts again after {left} windows, where the authors' script stops"
        )
    return "; ".join(parts) or None


def _named(datasets: list[IndexedDataset]) -> str:
    """The files of a text, for a message on a token that may lie in any of them."""
    return ", ".join(str(dataset.prefix) for dataset in datasets)


def _part(config: Config, split: str) -> str:
    """The part of the files, where NeoX's `split` decides it."""
    whole = all(documents is None for _, documents in sources(config, split))
    return "" if whole else f"{config.split}|{split}"
