"""Tiny runs with random weights under which attention, and the position in it, matters."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from megatron_patches import positions
from megatron_patches.config import from_mapping
from megatron_patches.standalone import GPT, export
from megatron_patches.standalone.build import shape_of

ROTATING = "rotary"  # the one that transformers' GPT-NeoX computes itself
# A method without a line in the carried file is refused by name; a new one needs none.
if importlib.util.find_spec("transformers"):
    from megatron_patches.hf.modeling_gpt_positions import METHODS as KNOWN

    CARRIED = [name for name in positions.names() if name in KNOWN]
else:
    CARRIED = []
METHODS = [*CARRIED, ROTATING]
VOCABULARY, LENGTH = 64, 16
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "no_weight_tying": True,
    "train_iters": 1,
    "train_micro_batch_size_per_gpu": 1,
    "padded_vocab_size": VOCABULARY,
    "dataset": "toy",
}


def a_run(folder: Path, method: str, *, dtype: str = "fp32", **changes: Any) -> Path:
    """A run folder as training leaves it, `global_step7`; `changes` are configuration keys."""
    merged = {**SETTINGS, "pos_emb": method, "precision": dtype, **changes}
    config = from_mapping({key: value for key, value in merged.items() if value is not None})
    model = GPT(shape_of(config, config.padded_vocab_size))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator) * 0.4
            if any(parameter is p for m in model.methods for p in m.parameters()):
                draw = draw.abs() + 0.1  # legal, and different in each head
            if "norm.weight" in key or "layernorm.weight" in key:
                draw += 1
            parameter.copy_(draw)
    model.to(export.DTYPES[dtype])
    export.export(model, folder, step=7, config=config, form=export.Form(dtype=dtype))
    return folder


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)
