"""NeoX's sample order: which tokens make up sample i of a training run.

Three maps, as in Megatron: `documents` (epochs of shuffled documents), `starts` (where each sample
begins in that endless text) and `order` (the order in which samples are read). One
`numpy.random.RandomState(seed)` draws the documents first, then the order; all epochs are shuffled
together. Consecutive samples share one token: the last label of one is the first input of the next.

The maps are made in memory at every start: 10 billion tokens in 3 million documents take 1.5 s and 0.2 GB
(scripts/bench_tokenizing.py), so there is no file of them that could be stale, raced for, or in a
folder that cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset

# NeoX asks each of several paths for half a percent more than its share, one path included.
SURPLUS = 1.005


def epochs_needed(tokens_per_epoch: int, length: int, samples: int) -> int:
    """Fewest passes over the text that give `samples` samples of `length + 1` tokens."""
    epochs = max(1, math.ceil((samples * length + 1) / tokens_per_epoch))
    while (epochs * tokens_per_epoch - 1) // length < samples:
        epochs += 1
    return epochs


class SampleOrder:
    """Samples of `length + 1` token ids, in NeoX's order.

    Args:
        dataset: the tokens.
        documents: indices of the documents that belong to this split.
        length: tokens a sample feeds to the model.
        samples: how many samples the run will ask for; NeoX's shuffle depends on it.
        seed: of the shuffle.

    Raises:
        DataError: the split has no documents, or fewer than two tokens.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: np.ndarray,
        length: int,
        samples: int,
        seed: int,
    ) -> None:
        self.dataset, self.length = dataset, length
        sizes = np.asarray(dataset.sizes, dtype=np.int64)
        tokens = int(sizes[documents].sum()) if len(documents) else 0
        if tokens < 2:
            raise DataError(
                f"{dataset.prefix}: {len(documents)} documents with {tokens} tokens in this split; "
                "at least two tokens are needed"
            )
        epochs = epochs_needed(tokens, length, samples)
        random = np.random.RandomState(seed)
        self.documents = np.tile(np.asarray(documents, dtype=np.int32), epochs)
        random.shuffle(self.documents)
        # Cumulative token counts replace Megatron's loop in C++: sample s starts at token s * length.
        self._ends = np.cumsum(sizes[self.documents])
        count = (epochs * tokens - 1) // length
        self.epochs = epochs
        self.order = np.arange(count, dtype=np.uint32 if count < 2**32 - 1 else np.int64)
        random.shuffle(self.order)

    def starts(self) -> np.ndarray:
        """Megatron's sample index, int64 `[samples + 1, 2]`: position in `documents`, and offset there."""
        first = np.arange(len(self.order) + 1, dtype=np.int64) * self.length
        # A start right at the end of a document is written as the first token of the next one.
        document = np.searchsorted(self._ends, first, side="right")
        before = np.where(document > 0, self._ends[np.maximum(document - 1, 0)], 0)
        return np.stack([document, first - before], axis=1)

    def __len__(self) -> int:
        # As in NeoX, whose dataset never reaches the last entry of its shuffled order.
        return max(len(self.order) - 1, 0)

    def __getitem__(self, index: int) -> np.ndarray:
        """int64 `[length + 1]`; IndexError outside `[0, len)`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.tokens_at(int(self.order[index]))

    def tokens_at(self, sample: int) -> np.ndarray:
        """The tokens of the unshuffled sample number `sample`, int64 `[length + 1]`."""
        need, start = self.length + 1, sample * self.length
        place = int(np.searchsorted(self._ends, start, side="right"))
        offset = start - (int(self._ends[place - 1]) if place else 0)
        parts = []
        while need:
            document = int(self.documents[place])
            take = min(need, int(self.dataset.sizes[document]) - offset)
            parts.append(self.dataset.get(document, offset, take))
            need, offset, place = need - take, 0, place + 1
        return np.concatenate(parts).astype(np.int64)


class Blend:
    """Several sample orders mixed by weight, as NeoX mixes several data paths.

    Sample i comes from the source that is furthest behind its share after i samples.

    Raises:
        DataError: a source without a sample, or with a weight that is not above 0.
    """

    def __init__(self, orders: Sequence[SampleOrder], weights: Sequence[float]) -> None:
        self.orders = list(orders)
        for number, (order, weight) in enumerate(zip(self.orders, weights, strict=True)):
            if not weight > 0 or not len(order):
                raise DataError(
                    f"data path {number} of {len(self.orders)} has weight {weight} and "
                    f"{len(order)} samples, both must be above 0: leave it out, or give more text"
                )
        # Sources that are equally far behind are told apart by the last bit: add as NeoX adds.
        shares = np.array(weights, dtype=np.float64)
        shares /= np.sum(shares)
        size = sum(len(order) for order in self.orders)
        self._source = np.empty(size, dtype=np.uint16)
        self._sample = np.empty(size, dtype=np.int64)
        taken = np.zeros(len(self.orders), dtype=np.int64)
        for i in range(size):
            source = int(np.argmax(shares * max(i, 1) - taken))
            self._source[i], self._sample[i] = source, taken[source]
            taken[source] += 1

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> np.ndarray:
        order = self.orders[int(self._source[index])]
        # Shares are rounded, so a source may be asked for a sample more than it has; NeoX wraps, too.
        return order[int(self._sample[index]) % len(order)]


Samples = SampleOrder | Blend


def micro_batches(
    samples: Samples, micro: int, rank: int, ranks: int, start: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Endless micro batches of one rank: `(first sample number, int64 [micro, length + 1])`.

    Micro batch n of all ranks together is samples `n * micro * ranks` onwards; each rank takes its
    consecutive share. When no whole batch is left the order starts again, as NeoX's loader does.
    `start` counts micro batches from the beginning of the run, so a resumed run continues exactly.

    Raises DataError when the text holds less than one batch.
    """
    together = micro * ranks
    per_pass = len(samples) // together
    if per_pass < 1:
        raise DataError(
            f"the text gives {len(samples)} samples, a batch over all processes needs "
            f"{together}: use more text, a smaller batch or a shorter seq_length"
        )
    number = start
    while True:
        first = (number % per_pass) * together + rank * micro
        yield first, np.stack([samples[i] for i in range(first, first + micro)])
        number += 1
