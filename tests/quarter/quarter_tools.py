"""Studies, prepared folders and runs for the tests of the quarter hour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.indexed import write_indexed
from megatron_patches.quarter.budget import Clock
from megatron_patches.quarter.prepare import prepare
from megatron_patches.quarter.run import QuarterHour, Request

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_quarter_hour.py"
VOCABULARY = 64
METHODS = ("kerple_log", "alibi", "rotary")

BASE = """
num_layers: 2
hidden_size: 32
num_attention_heads: 2
seq_length: 32
max_position_embeddings: 32
norm: layernorm
no_weight_tying: true
hidden_dropout: 0.0
attention_dropout: 0.0
scaled_upper_triang_masked_softmax_fusion: false
bias_gelu_fusion: false
optimizer: {type: Adam, params: {lr: 1.0e-2, betas: [0.9, 0.95], eps: 1.0e-8}}
weight_decay: 0.1
train_batch_size: 8
train_iters: 30
lr_decay_style: cosine
warmup: 0.1
gradient_clipping: 0.5
checkpoint_factor: 1000
eval_interval: 1000
eval_iters: 0
log_interval: 5
padded_vocab_size: 64
"""

STUDY = """
base: {folder}/base.yml
overrides: {{precision: {precision}, distributed_backend: gloo}}
methods: [{methods}]
datasets: [{folder}/toy.yml]
seeds: [7]
train_lengths: [32]
eval:
  lengths: [32, 64, 128]
  protocols: [nonoverlap, position]
  max_tokens: 1025
  kernels: true
"""


def write_text(folder: Path, *, train: int = 40, valid: int = 1200) -> None:
    """Noisy counting, which a small model learns in a few steps."""
    random = np.random.RandomState(0)

    def document(length: int) -> np.ndarray:
        return np.append(1 + np.cumsum(random.randint(1, 4, size=length)) % (VOCABULARY - 4), 0)

    parts = {
        "train": [document(random.randint(40, 300)) for _ in range(train)],
        "valid": [document(valid // 3) for _ in range(4)],
        "test": [document(100)],
    }
    for part, texts in parts.items():
        sidecar = {
            "tokenizer": {"fingerprint": "tok-a", "vocab_size": VOCABULARY - 3},
            "text_bytes": 2 * sum(map(len, texts)),
        }
        write_indexed(folder / part, texts, vocab_size=VOCABULARY - 3, sidecar=sidecar)


def write_study(
    folder: Path, *, methods: tuple[str, ...] = METHODS, precision: str = "fp32"
) -> Path:
    write_text(folder)
    (folder / "base.yml").write_text(BASE)
    lines = [f"{part}_data_paths: [{folder}/{part}]\n" for part in ("train", "valid", "test")]
    (folder / "toy.yml").write_text("dataset: toy\n" + "".join(lines))
    file = folder / "small.yml"
    text = STUDY.format(folder=folder, methods=", ".join(methods), precision=precision)
    file.write_text(text)
    return file


def prepared(study: Path, output: Path, **given: Any) -> Path:
    prepare(study, output, lambda text: None, **given)
    return output


def request(data: Path, output: Path, **changes: Any) -> Request:
    usual = {"minutes": 5.0, "device": torch.device("cpu"), "precision": "float32"}
    return Request(data, output, **{**usual, **changes})


class FakeClock(Clock):
    """Every look at it takes `tick` seconds."""

    def __init__(self, tick: float) -> None:
        super().__init__(begun=0.0)
        self.tick, self.seconds = tick, 0.0

    def now(self) -> float:
        self.seconds += self.tick
        return self.seconds


def run(
    plan: Any, asked: Request, clock: Clock | None = None
) -> tuple[QuarterHour, int, list[str]]:
    said: list[str] = []
    hour = QuarterHour(plan, asked, clock or Clock(), said.append)
    return hour, hour.go(), said


def command(*arguments: object, blocked: str = "") -> subprocess.CompletedProcess[str]:
    """The script in a fresh process in which the packages named in `blocked` cannot be imported."""
    code = (
        f"import runpy, sys\nfor name in {blocked.split()!r}: sys.modules[name] = None\n"
        f"sys.argv = {[str(SCRIPT), *map(str, arguments)]!r}\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
