"""What else than weights and optimizer NeoX and DeepSpeed 0.19.8 look for in a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_patches.config import Config, batch_arithmetic

DEEPSPEED = "0.19.8"  # the version whose files these are
# DeepSpeed's distance between the seeds of what all shards draw alike and of what each draws itself.
SHARD_SEED = 2718
# NeoX compares these with its own arguments and stops at the first difference.
COMPARED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "tokenizer_type",
    "model_parallel_size",
)


def entries(config: Config, rows: int, step: int, rank: int, shards: int) -> dict[str, Any]:
    """Every entry of shard `rank`'s file but `module`, `buffer_names` and `optimizer`.

    `config` is NeoX's configuration, `rows` the padded vocabulary. Progress is that of one
    data-parallel process; NeoX finds its place in the data by the iteration.
    """
    batch = batch_arithmetic(config, 1)
    return {
        "param_shapes": None,  # this and three more: under ZeRO alone
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "lr_scheduler": schedule(config, step),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": step * batch.global_,
        "dp_world_size": 1,
        "mp_world_size": shards,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": shards},
        "ds_config": {
            "train_batch_size": batch.global_,
            "train_micro_batch_size_per_gpu": batch.micro,
            "optimizer": config.optimizer.model_dump(mode="json", exclude_none=True),
            "zero_optimization": config.zero_optimization or {"stage": 0},
        },
        "ds_version": DEEPSPEED,
        "iteration": step,
        "args": {**{key: getattr(config, key) for key in COMPARED}, "padded_vocab_size": rows},
        **random_states(config, rank),
    }


def schedule(config: Config, step: int) -> dict[str, Any]:
    """The state of NeoX's learning-rate schedule after `step` updates."""
    return {
        "start_lr": config.optimizer.params.lr,
        "warmup_iter": config.warmup * config.lr_decay_iters,
        "num_iters": step,
        "decay_style": config.lr_decay_style,
        "end_iter": config.lr_decay_iters,
        "min_lr": config.min_lr,
    }


def random_states(config: Config, rank: int) -> dict[str, Any]:
    """Generators as NeoX seeds them at a start. Dropout alone draws from them; samples do not."""
    seed = config.seed
    return {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": np.random.RandomState(seed).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(seed).get_state(),
        "cuda_rng_state": device_state(config, seed),
        "rng_tracker_states": {
            "model-parallel-rng": device_state(config, seed + SHARD_SEED + rank)
        },
    }


def device_state(config: Config, seed: int) -> Tensor:
    """uint8, in the form of the device that trains: 16 bytes on a GPU, 5056 on a CPU.

    `distributed_backend: gloo` stands for the CPU. NeoX on the other kind needs `no_load_rng: true`.
    """
    if config.distributed_backend == "gloo":
        return torch.Generator().manual_seed(seed).get_state()
    # CUDA's generator: the seed, then how far it has been used.
    return torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8)
