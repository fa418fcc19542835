"""Where a configuration finds its tokens, and the samples that NeoX would draw from them."""

from __future__ import annotations

import math

import numpy as np

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset
from data_prep.splits import split_ranges
from megatron_patches.config import Batch, Config, ConfigError
from megatron_patches.standalone.samples import (
    SURPLUS,
    Blend,
    SampleOrder,
    Samples,
    epochs_needed,
    micro_batches,
)

__all__ = [
    "SPLITS",
    "Blend",
    "SampleOrder",
    "Samples",
    "build_samples",
    "check_entries",
    "epochs_needed",
    "micro_batches",
    "sources",
    "split_documents",
    "token_stream",
    "validation_batches",
]

SPLITS = ("train", "valid", "test")


def split_documents(dataset: IndexedDataset, split: str, part: str) -> np.ndarray:
    """Documents of `train`, `valid` or `test` under NeoX's `split` string."""
    start, stop = split_ranges(split, len(dataset))[SPLITS.index(part)]
    return np.arange(start, stop, dtype=np.int32)


def sources(config: Config, part: str) -> list[tuple[str, np.ndarray | None]]:
    """Data prefixes of a split and the documents taken from each; None means all of them.

    Raises ConfigError when the configuration names no data for this split.
    """
    paths = getattr(config, f"{part}_data_paths")
    if paths:
        return [(path, None) for path in paths]
    if config.data_path:
        dataset = IndexedDataset(config.data_path)
        documents = split_documents(dataset, config.split, part)
        if not len(documents):
            raise ConfigError(
                f"`split` {config.split!r} leaves no documents of {config.data_path} "
                f"({len(dataset)} in all) for {part}"
            )
        return [(config.data_path, documents)]
    raise ConfigError(f"no data for {part}: set `{part}_data_paths` or `data_path` with `split`")


def build_samples(config: Config, part: str, length: int, samples: int) -> Samples:
    """The samples of one split as NeoX would draw them for a run that asks for `samples` of them."""
    found = sources(config, part)
    given = getattr(config, f"{part}_data_weights")
    weights = list(given) if given else [1.0] * len(found)
    if len(weights) != len(found):
        raise ConfigError(f"{len(weights)} `{part}_data_weights` for {len(found)} data paths")
    for (prefix, _), weight in zip(found, weights, strict=True):
        if not weight > 0:  # NeoX would draw from it all the same wherever the others are even
            raise DataError(
                f"`{part}_data_weights` gives {prefix} the weight {weight}: leave the path and its "
                "weight out, or make the weight larger than 0"
            )
    separate = bool(getattr(config, f"{part}_data_paths"))
    # Rounded where NeoX rounds: it divides here, and in its blend the shares once more.
    shares = [weight / sum(weights) for weight in weights]
    orders = []
    for (prefix, documents), share in zip(found, shares, strict=True):
        dataset = IndexedDataset(prefix)
        if documents is None:
            documents = np.arange(len(dataset), dtype=np.int32)
        wanted = math.ceil(samples * share * SURPLUS) if separate else samples
        order = SampleOrder(dataset, documents, length, wanted, config.seed)
        if len(found) > 1 and not len(order):
            # Its one sample is the one never reached, and NeoX fails: two samples give one.
            order = SampleOrder(dataset, documents, length, 2, config.seed)
        orders.append(order)
    return Blend(orders, shares) if len(orders) > 1 else orders[0]


def validation_batches(config: Config, batch: Batch, rank: int, ranks: int) -> list[np.ndarray]:
    """The micro batches of one rank at every validation, the same whatever the step; may be none."""
    has_text = bool(config.valid_data_paths or config.data_path)
    if not config.eval_iters or not config.eval_interval or not has_text:
        return []
    length = config.seq_length_val or config.seq_length
    asked = (config.train_iters // config.eval_interval + 1) * config.eval_iters
    samples = build_samples(config, "valid", length, asked * batch.global_)
    batches = micro_batches(samples, batch.micro, rank, ranks, 0)
    # One of NeoX's evaluation steps is as many micro batches as a training step.
    return [next(batches)[1] for _ in range(config.eval_iters * batch.accumulation)]


def check_entries(tokens: np.ndarray, vocabulary: int, where: str) -> None:
    """Raises DataError, with `where`, for a token that the model's embedding has no row for.

    The embedding's own error, on a GPU a failed assertion, would name neither.
    """
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest >= vocabulary:
        wrong = smallest if smallest < 0 else largest
        raise DataError(
            f"{where}: token {wrong} is outside the model's vocabulary of {vocabulary}: the text was "
            "prepared with another tokenizer"
        )


def token_stream(config: Config, part: str) -> tuple[np.ndarray, list[IndexedDataset]]:
    """All tokens of a split in file order, documents joined as stored, for evaluation.

    Returns the ids `[tokens]` (a memory map where there is one source) and the open data sets.
    """
    pieces: list[np.ndarray] = []
    datasets = []
    for prefix, documents in sources(config, part):
        dataset = IndexedDataset(prefix)
        datasets.append(dataset)
        if documents is None:
            pieces.append(dataset.tokens)
            continue
        first, last = int(documents[0]), int(documents[-1])
        item = dataset.dtype.itemsize
        begin = int(dataset.pointers[first]) // item
        end = int(dataset.pointers[last]) // item + int(dataset.sizes[last])
        pieces.append(dataset.tokens[begin:end])
    return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)), datasets
