"""A study whose runs take a second each: a toy text, a toy model, all files in one folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data_prep.indexed import IndexedDataset, write_indexed
from megatron_patches.analysis.retrieval_rows import SCORES, RetrievalRow
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


def text_of(run: Run, protocol: str | None, split: str = "valid", **asked: Any) -> dict[str, str]:
    """`data` and `tokenizer` of a row, as an evaluation makes them; `asked`: of the study's `eval`.

    The cut is written out here, so that a study is not compared with itself.
    """
    (prefix,) = getattr(run.config, f"{split}_data_paths")
    data = IndexedDataset(prefix).fingerprint
    longest, first = asked.get("longest", max(LENGTHS)), asked.get("max_tokens", 129)
    cut = {
        None: "",
        "paper": f"|paper {asked.get('paper_windows', 320)}",
        "sliding": f"|first {first}",
    }.get(protocol, f"|first {first}|aligned to {longest}")
    if cut:
        data = hashlib.sha256(f"{data} {cut}".encode()).hexdigest()[:16]
    return {"data": data, "tokenizer": "tok-a"}


def row(run: Run, **changes: Any) -> Row:
    """A row of a run of the toy study; under `position` unless `changes` say otherwise.

    `asked` holds what its text depends on: `longest`, `max_tokens`, `paper_windows`.
    """
    asked = changes.pop("asked", {})
    scores = {"loss": 1.0, "perplexity": 2.718281828459045, "bits_per_byte": None}
    names = ("git_sha", "engine", "attention", "dtype")
    cell = {"method": "alibi", "dataset": "text", "seed": 1, "train_length": 16, "last_k": None}
    cell |= {"protocol": "position", "split": "valid", "config_sha": run.sha, "step": 4}
    cell |= {"parameters": 1, "seconds": 0.0, **dict.fromkeys(names, "x"), **scores}
    length = changes.get("eval_length", 16)
    windows = changes.pop("windows", 1)
    cell |= {"eval_length": length, "stride": length, "tokens": length * windows}
    cell |= {"windows": windows, "window_losses": [1.0] * windows}
    protocol = changes.get("protocol", "position")
    cell |= {"position_losses": [1.0]} if protocol == "position" else {}
    if changes.get("status") in ("refused", "failed"):
        cell |= {**dict.fromkeys(scores), "tokens": 0, "windows": 0, "window_losses": []}
        cell |= {"message": "why", "position_losses": None}
    cell |= text_of(run, protocol, changes.get("split", "valid"), **asked)
    return Row(**{**cell, **changes})


def retrieved(run: Run, task: str, source: str, **changes: Any) -> RetrievalRow:
    """A row of retrieval of a run of the toy study."""
    names = ("questions", "git_sha", "engine", "attention", "dtype")
    cell: dict[str, Any] = {"method": "alibi", "dataset": "text", "seed": 1, "train_length": 16}
    cell |= {"task": task, "source": source, "split": "valid", "eval_length": 16, "depth": 0.5}
    cell |= {"samples": 3, "answer_tokens": 2, "distance": 4, "config_sha": run.sha, "step": 4}
    cell |= {"parameters": 1, "seconds": 0.0, **dict.fromkeys(names, "x")}
    cell |= {"exact": 1.0, "token_accuracy": 1.0, "control_accuracy": 0.0}
    cell |= {"loss": 1.0, "control_loss": 2.0, "gain": 1.0}
    cell |= {"losses": [1.0] * 3, "control_losses": [2.0] * 3}
    cell |= {"correct": [2] * 3, "control_correct": [0] * 3}
    cell |= text_of(run, None, changes.get("split", "valid"))
    if changes.get("status") in ("refused", "failed"):
        cell |= {**dict.fromkeys(SCORES), "distance": None, "message": "why"}
        cell |= {key: [] for key in ("losses", "control_losses", "correct", "control_correct")}
    return RetrievalRow(**{**cell, **changes})
