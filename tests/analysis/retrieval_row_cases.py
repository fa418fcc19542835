"""Retrieval rows for the tests of the analysis package."""

from __future__ import annotations

from typing import Any

from megatron_patches.analysis.retrieval_rows import SCORES, RetrievalRow, scores


def fields(**changes: Any) -> dict[str, Any]:
    """The fields of a valid row: two answers of four tokens, one of them right as a whole."""
    base: dict[str, Any] = {
        "method": "alibi",
        "dataset": "books",
        "seed": 1,
        "train_length": 512,
        "task": "copy",
        "source": "text",
        "split": "valid",
        "eval_length": 1024,
        "depth": 0.5,
        "samples": 2,
        "answer_tokens": 4,
        "distance": 500,
        "tokenizer": "tok-1",
        "data": "data-1",
        "questions": "asked-1",
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
        "losses": [1.0, 2.0],
        "control_losses": [3.0, 3.5],
        "correct": [4, 1],
        "control_correct": [0, 1],
        "options": {},
        # By hand: one of two answers, 5 of 8 tokens, 1 of 8, and the means of the losses.
        "exact": 0.5,
        "token_accuracy": 0.625,
        "control_accuracy": 0.125,
        "loss": 1.5,
        "control_loss": 3.25,
        "gain": 1.75,
    }
    return base | changes


def make(method: str, seed: int, length: int, depth: float, gain: float | None, **changes: Any):
    """A row with this gain, or a refused one for None."""
    cell = {"method": method, "seed": seed, "eval_length": length, "depth": depth}
    cell |= {"config_sha": f"{method}{seed}"}
    if gain is None:
        gone = {**dict.fromkeys(SCORES), "distance": None}
        gone |= {name: [] for name in ("losses", "control_losses", "correct", "control_correct")}
        why = {"status": "refused", "message": f"cannot read {length}"}
        return RetrievalRow(**fields(**{**cell, **gone, **why, **changes}))
    lists = {"losses": [2.0, 2.0], "control_losses": [2.0 + gain] * 2}
    lists |= {"correct": [4, 1], "control_correct": [0, 1]}
    return RetrievalRow(**fields(**{**cell, **lists, **scores(*lists.values(), 4), **changes}))


def study() -> list[RetrievalRow]:
    """Two methods, three seeds, two lengths, two depths; ``learned`` cannot read beyond 512."""
    rows = []
    for seed in (1, 2, 3):
        for depth in (0.0, 1.0):
            # Means over depths: 1.5, 2.5 and 3.5, then 0.5, 1 and 1.5.
            rows.append(make("alibi", seed, 512, depth, seed + depth))
            rows.append(make("alibi", seed, 1024, depth, seed * depth))
            rows.append(make("learned", seed, 512, depth, 0.25))
            rows.append(make("learned", seed, 1024, depth, None))
    return rows
