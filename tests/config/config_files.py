"""Where the shipped files lie, and a smallest configuration."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"

MINIMAL = """\
num_layers: 2
hidden_size: 32
num_attention_heads: 4
seq_length: 16
max_position_embeddings: 16
train_iters: 10
pos_emb: kerple_log
"""
