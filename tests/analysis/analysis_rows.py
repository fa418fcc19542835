"""Rows for the tests of the analysis package."""

from __future__ import annotations

import math
from typing import Any

from megatron_patches.analysis.rows import KernelRow, Row
from megatron_patches.analysis.training_rows import TrainingRow


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


def training(method: str, seed: int, **changes: Any) -> TrainingRow:
    """100 steps of 2048 tokens, logged every 10: loss 5 - step / 50, one parameter of two heads."""
    steps = list(range(10, 101, 10))
    base: dict[str, Any] = {
        **{"method": method, "dataset": "books", "seed": seed, "train_length": 512},
        **{"data": "data-1", "tokenizer": "tok-1", "config_sha": f"{method}{seed}"},
        **{"git_sha": "abc123", "engine": "standalone", "step": 100, "parameters": 1000},
        **{"train_iters": 100, "global_batch": 4, "tokens": 204_800, "seconds": 20.0},
        "tokens_per_second": 10_240.0,
        **{"machine": "a CPU, 2 cores, 1 process of 1 thread", "iterations": steps},
        "lm_loss": [5 - step / 50 for step in steps],
        "learning_rate": [1e-3] * 10,
        "validation_iterations": [50, 100],
        "validation_loss": [4.2, 3.3],
        "position": {
            "bias_p": {
                "mean": [1 + step / 100 for step in steps],
                "std": [0.5] * 10,
                "min": [0.5 + step / 100 for step in steps],
                "max": [1.5 + step / 100 for step in steps],
            }
        },
        **{"end_slope": None, "end_slope_error": None},
    }
    return TrainingRow(**(base | changes))
