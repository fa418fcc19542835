"""Rows for the tests of the analysis package."""

from __future__ import annotations

import math
from typing import Any

from megatron_patches.analysis.rows import KernelRow, Row


def fields(**changes: Any) -> dict[str, Any]:
    """The fields of a valid row: loss 2 over two windows of 1024 tokens."""
    base: dict[str, Any] = {
        "method": "alibi",
        "dataset": "books",
        "seed": 1,
        "train_length": 512,
        "eval_length": 1024,
        "protocol": "nonoverlap",
        "split": "valid",
        "stride": 1024,
        "last_k": None,
        "loss": 2.0,
        "perplexity": math.exp(2.0),
        "bits_per_byte": None,
        "tokens": 2048,
        "windows": 2,
        "tokenizer": "tok-1",
        "data": "data-1",
        "config_sha": "c0ffee",
        "git_sha": "abc123",
        "engine": "standalone",
        "attention": "chunked",
        "dtype": "float32",
        "step": 100,
        "parameters": 1000,
        "seconds": 1.5,
        "status": "ok",
        "message": None,
        "window_losses": [1.5, 2.5],
        "position_losses": None,
        "options": {},
        "documents_isolated": False,
    }
    return base | changes


def make(method: str, seed: int, length: int, perplexity: float | None, **changes: Any) -> Row:
    """A row with this perplexity, or a refused one for None; 2048 tokens at every length."""
    common = {
        **{"method": method, "seed": seed, "eval_length": length, "stride": length},
        **{"config_sha": f"{method}{seed}"},
    }
    if perplexity is None:
        gone = {"loss": None, "perplexity": None, "tokens": 0, "windows": 0, "window_losses": []}
        reason = {"status": "refused", "message": f"cannot read {length}"}
        return Row(**fields(**{**common, **gone, **reason, **changes}))
    loss, windows = math.log(perplexity), 2048 // length
    scores = {"loss": loss, "perplexity": perplexity, "windows": windows}
    return Row(**fields(**{**common, **scores, "window_losses": [loss] * windows, **changes}))


def study() -> list[Row]:
    """Three methods, three seeds, three lengths; ``table`` cannot read beyond 512."""
    values = {
        "kerple_log": {512: (23.8, 23.9, 24.0), 1024: (22.0, 22.1, 22.2), 2048: (21.0, 21.5, 22.0)},
        "alibi": {512: (23.7, 24.0, 23.9), 1024: (22.5, 22.7, 22.6), 2048: (22.0, 22.4, 23.1)},
        "learned": {512: (25.0, 25.0, 25.3), 1024: (None,) * 3, 2048: (None,) * 3},
    }
    return [
        make(method, seed, length, perplexity)
        for method, lengths in values.items()
        for length, perplexities in lengths.items()
        for seed, perplexity in enumerate(perplexities, 1)
    ]


def kernel(head: int = 0, **changes: Any) -> KernelRow:
    """A log kernel over the distances 0 to 63."""
    distances = list(range(64))
    base: dict[str, Any] = {
        "method": "kerple_log",
        "dataset": "books",
        "seed": 1,
        "step": 100,
        "head": head,
        "parameters": {"bias_p": 1.0 + head, "bias_a": 0.5},
        "distances": distances,
        "bias": [-(1.0 + head) * math.log1p(0.5 * d) for d in distances],
        "weight": None,
    }
    return KernelRow(**(base | changes))
