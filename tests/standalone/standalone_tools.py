"""Tiny runs for the tests of the standalone engine: settings, their files, and what they leave."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.indexed import write_indexed
from megatron_patches.config import Config, from_mapping
from megatron_patches.standalone import manifest

ROOT = Path(__file__).resolve().parents[2]
# The whole set of reference files has more checkpoints than the repository holds (see its README).
GOLDENS = Path(os.environ.get("KERPLE_GOLDENS") or Path(__file__).resolve().parents[1] / "goldens")
VOCABULARY = 64

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "pos_emb": "kerple_log",
    "norm": "layernorm",
    "no_weight_tying": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "scaled_upper_triang_masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8}},
    "weight_decay": 0.1,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "train_iters": 6,
    "lr_decay_style": "cosine",
    "warmup": 0.1,
    "gradient_clipping": 1.0,
    "precision": "fp32",
    "distributed_backend": "gloo",
    "checkpoint_factor": 1000,
    "eval_interval": 1000,
    "eval_iters": 0,
    "log_interval": 1,
    "padded_vocab_size": VOCABULARY,
    "eval_lengths": [32, 64],
    "dataset": "toy",
}

# Steps 3, 6 and 9; with optimizer states in files of their own.
THREE_STEPS = {"train_iters": 9, "checkpoint_factor": 3, "zero_optimization": {"stage": 1}}


def write_text(
    folder: Path,
    *,
    seed: int = 0,
    fingerprint: str = "tok-a",
    documents: int = 12,
    valid_tokens: int = 700,
) -> None:
    """`train`, `valid` and `test` in `folder`: noisy counting, so that a model can learn it."""
    random = np.random.RandomState(seed)

    def document(length: int) -> np.ndarray:
        steps = random.randint(1, 4, size=length)
        return np.append(1 + np.cumsum(steps) % (VOCABULARY - 4), 0)

    parts = {
        "train": [document(random.randint(40, 300)) for _ in range(documents)],
        "valid": [document(valid_tokens - 1)],
        "test": [document(500)],
    }
    for part, texts in parts.items():
        tokens = sum(map(len, texts))
        sidecar = {
            "tokenizer": {"fingerprint": fingerprint, "vocab_size": VOCABULARY - 3},
            "text_bytes": 2 * tokens,
        }
        write_indexed(folder / part, texts, vocab_size=VOCABULARY - 3, sidecar=sidecar)


def settings(text: Path, save: Path, **changes: Any) -> dict[str, Any]:
    """`TINY` on the data in `text`, written to `save`, with `changes`; a value None leaves a key out."""
    paths = {f"{part}_data_paths": [str(text / part)] for part in ("train", "valid", "test")}
    merged = {**TINY, **paths, "save": str(save), **changes}
    return {key: value for key, value in merged.items() if value is not None}


def tiny(text: Path, save: Path, **changes: Any) -> Config:
    return from_mapping(settings(text, save, **changes))


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["lm_loss"] for row in log(folder) if "lm_loss" in row]


def weights(folder: Path) -> dict[str, Tensor]:
    """The stored tensors of the run's last step, by their name in the file."""
    step = folder / (folder / "latest").read_text().strip()
    found = torch.load(step / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    different = [key for key in found if not torch.equal(found[key], wanted[key])]
    assert not different


def clean_environment() -> dict[str, str]:
    """For a child process: without the process group's variables, which an earlier test may have set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE")
    left_out = {*names, "MASTER_ADDR", "MASTER_PORT", "PYTHONWARNINGS"}
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"}


def whole_step(folder: Path) -> str:
    """The step that `latest` names, after its files were compared with its manifest."""
    named = (folder / "latest").read_text()
    records = manifest.read(folder / named)
    assert records is not None
    present = {file.name for file in (folder / named).iterdir()} - {manifest.NAME}
    assert set(records) == present
    assert not manifest.faults(folder / named, records, records)
    return named
