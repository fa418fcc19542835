"""What the tests of exported checkpoints share: models with known weights, moments, foreign files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import standalone_tools as tools
import torch

from megatron_patches.config import Config, from_mapping
from megatron_patches.standalone import GPT
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.export import Form
from megatron_patches.standalone.moments import Moments
from megatron_patches.standalone.weights import safe_load

NEOX = sorted((tools.GOLDENS / "neox" / "checkpoints").iterdir(), key=lambda path: path.name)
FORK = sorted(
    path
    for path in (tools.GOLDENS / "fork").iterdir()
    if (path / "layer_00-model_00-model_states.pt").is_file()
)
FORK_CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 12,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "no_weight_tying": True,
    "make_vocab_size_divisible_by": 64,
    "train_iters": 1,
    "train_micro_batch_size_per_gpu": 1,
}


def form_of(golden: Path) -> Form:
    method, stages, shards = golden.name.rsplit("-", 2)
    return Form("single" if stages == "pp0" else "layers", int(shards.removeprefix("mp")))


def a_model(**changes: Any) -> tuple[GPT, Config]:
    """A tiny model with random weights, biases and norms included, and its configuration."""
    merged = {**tools.TINY, "train_iters": 20, "save": "somewhere", **changes}
    config = from_mapping({key: value for key, value in merged.items() if value is not None})
    model = GPT(shape_of(config, config.padded_vocab_size))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            # legal for every position method
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.1)
    return model, config


def some_moments(model: GPT) -> Moments:
    generator = torch.Generator().manual_seed(3)
    found = Moments({}, {}, {})
    for number, (key, parameter) in enumerate(model.named_parameters()):
        found.steps[key] = 100 + number
        found.mean[key] = torch.randn(parameter.shape, generator=generator)
        found.square[key] = torch.rand(parameter.shape, generator=generator)
    return found


def assert_same_moments(found: Moments, wanted: Moments) -> None:
    assert found.steps == wanted.steps
    tools.assert_same(found.mean, wanted.mean)
    tools.assert_same(found.square, wanted.square)


def stored(folder: Path, rank: int = 0) -> dict[str, Any]:
    return safe_load(folder / f"mp_rank_{rank:02d}_model_states.pt")
