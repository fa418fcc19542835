"""How much text scored tokens stand for: what bits per byte divide by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from data_prep.indexed import IndexedDataset
from data_prep.tokenizing import tokenizer_beside
from megatron_patches.standalone.fingerprints import tokenizer_fingerprint
from megatron_patches.standalone.windows import Window


def byte_counts(datasets: Sequence[IndexedDataset]) -> np.ndarray | None:
    """Bytes of text behind each id, int64 [V], by the tokenizer that lies beside the files.

    None when there is none, when it is not the one of the files, and when its ids do not spell text
    byte for byte: then nobody can say how many bytes a part of the text has.
    """
    tokenizer = tokenizer_beside(datasets[0].prefix)
    if tokenizer is None or tokenizer.fingerprint != tokenizer_fingerprint(datasets):
        return None
    return tokenizer.byte_counts()


def scored_bytes(tokens: np.ndarray, windows: Iterable[Window], counts_V: np.ndarray) -> int:
    """Bytes of the targets that `windows` of `tokens` (int [T]) score."""
    return sum(
        int(counts_V[tokens[w.start + w.score_from + 1 : w.start + w.length + 1]].sum())
        for w in windows
    )


def bits_per_byte(loss: float, tokens: int, text_bytes: int | None) -> float | None:
    """Of `tokens` with a mean loss in nats that spell `text_bytes`; None where these are unknown or 0."""
    return loss * tokens / math.log(2) / text_bytes if text_bytes else None
