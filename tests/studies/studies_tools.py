"""A study whose runs take a second each: a toy text, a toy model, all files in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data_prep.indexed import write_indexed
from megatron_patches.analysis.rows import Row
from megatron_patches.studies import Run

ENTRIES = 60
METHODS = ["alibi", "rotary"]
SEEDS = [1, 2]
LENGTHS = [16, 32]

BASE: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "norm": "layernorm",
    "no_weight_tying": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "weight_decay": 0.0,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "eval_iters": 0,
    "log_interval": 2,
    "checkpoint_factor": 2,
    "make_vocab_size_divisible_by": 8,
}


def write_study(folder: Path, **changes: Any) -> Path:
    """The study's file; `changes` replace its keys, None leaves one out."""
    random = np.random.RandomState(0)
    for part, tokens in {"train": 3000, "valid": 300, "test": 300}.items():
        sidecar = {"tokenizer": {"fingerprint": "tok-a", "vocab_size": ENTRIES}, "tokens": tokens}
        texts = [random.randint(0, ENTRIES, size=tokens)]
        write_indexed(folder / part, texts, vocab_size=ENTRIES, sidecar=sidecar, overwrite=True)
    paths = {f"{part}_data_paths": [str(folder / part)] for part in ("train", "valid", "test")}
    layers = {"base": BASE, "text": {"dataset": "text", **paths}}
    for layer, keys in layers.items():
        (folder / f"{layer}.yml").write_text(yaml.safe_dump(keys))
    study = {
        "base": str(folder / "base.yml"),
        "cluster": "cpu",
        "overrides": {"train_iters": 4},
        "methods": METHODS,
        "datasets": [str(folder / "text.yml")],
        "seeds": SEEDS,
        "train_lengths": [16],
        "eval": {"lengths": LENGTHS, "max_tokens": 129},
        "output": str(folder / "results"),
        "checkpoints": str(folder / "runs"),
        **changes,
    }
    path = folder / "toy.yml"
    path.write_text(yaml.safe_dump({k: v for k, v in study.items() if v is not None}))
    return path


def row(run: Run, **changes: Any) -> Row:
    """A row of a run of the toy study; under `position` unless `changes` say otherwise."""
    scores = {"loss": 1.0, "perplexity": 2.718281828459045, "bits_per_byte": None}
    names = ("tokenizer", "data", "git_sha", "engine", "attention", "dtype")
    cell = {"method": "alibi", "dataset": "text", "seed": 1, "train_length": 16, "last_k": None}
    cell |= {"protocol": "position", "split": "valid", "config_sha": run.sha, "step": 4}
    cell |= {"parameters": 1, "seconds": 0.0, **dict.fromkeys(names, "x"), **scores}
    length = changes.get("eval_length", 16)
    windows = changes.pop("windows", 1)
    cell |= {"eval_length": length, "stride": length, "tokens": length * windows}
    cell |= {"windows": windows, "window_losses": [1.0] * windows}
    cell |= {"position_losses": [1.0]} if changes.get("protocol", "position") == "position" else {}
    return Row(**{**cell, **changes})
