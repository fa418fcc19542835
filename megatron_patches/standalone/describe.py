"""What a configuration would do: size, tokens, memory, method and attention, without starting it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_patches.attention import preferences
from megatron_patches.attention.memory import Size, peak_bytes
from megatron_patches.config import Config, batch_arithmetic, config_sha, data_parallel_size, dump
from megatron_patches.config.checks import PARTS
from megatron_patches.standalone.build import prepare_command, shape_of
from megatron_patches.standalone.shape import ModelShape, position_method

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def parameter_count(shape: ModelShape) -> int:
    """The number of trained values of `GPT(shape)`, by arithmetic: 1.3B need not be allocated."""
    width, inner = shape.hidden_size, shape.intermediate_size or 4 * shape.hidden_size
    attention = 4 * width * width + 4 * width
    mlp = 2 * width * inner + inner + width
    norms = 4 * width
    embedding = shape.vocabulary * width * (1 if shape.tied_output else 2)
    method = position_method(shape)
    own = sum(p.numel() for p in method.parameters())
    shared = (shape.position_sharing or method.sharing) == "model" or method.place == "embedding"
    copies = 1 if shared else shape.layers
    return embedding + shape.layers * (attention + mlp + norms) + 2 * width + own * copies


def training_bytes(config: Config, shape: ModelShape, micro: int, ranks: int) -> int:
    """Rough peak of one process: weights, gradients, Adam's moments, activations, logits."""
    size = BYTES[config.torch_dtype_name]
    count = parameter_count(shape)
    masters = 0 if size == 4 else 4
    split = [1 if config.zero_stage < stage else ranks for stage in (3, 2, 1)]
    state = (
        count * (size // split[0] or 1) + count * 4 // split[1] + count * (8 + masters) // split[2]
    )
    tokens = micro * config.seq_length
    # Tensors of the model's width that a layer keeps for its backward: norms, q k v, output, MLP.
    kept = 2 if shape.checkpoint_activations else 16
    activations = tokens * shape.hidden_size * shape.layers * kept * size
    logits = tokens * shape.vocabulary * (size + 4 + 4)
    return state + activations + logits


def attention_bytes(shape: ModelShape, impl: str, batch: int, length: int, **size: Any) -> int:
    """Expected peak of one layer's attention above q, k and v; `size` as in `attention.memory.Size`."""
    return peak_bytes(impl, Size(batch, shape.heads, length, length, shape.head_dim, **size))


def _data(config: Config) -> str:
    """Which of the prepared files are not here; a plan may be made on another machine than its data."""
    prefixes = [path for part in PARTS for path in getattr(config, f"{part}_data_paths") or ()]
    prefixes += [config.data_path] if config.data_path else []
    missing = [
        prefix
        for prefix in prefixes
        if not all(Path(f"{prefix}.{kind}").is_file() for kind in ("bin", "idx"))
    ]
    if not missing:
        return ", ".join(prefixes) or "none configured"
    return f"not here: {', '.join(missing)} ({prepare_command(config)})"


def describe(config: Config, processes: int) -> str:
    """Text for `--dry-run`: the resolved YAML, then what it amounts to.

    Raises ConfigError when the batch does not fit the processes, the vocabulary is unknown, or the
    position method refuses an option.
    """
    import torch

    ranks = data_parallel_size(config, processes)
    batch = batch_arithmetic(config, ranks)
    shape = shape_of(config)
    # What the configuration asks for, not what this machine has: a plan for GPUs is made on laptops.
    gpus = config.distributed_backend == "nccl" or (
        config.distributed_backend is None and torch.cuda.is_available()
    )
    device = torch.device("cuda" if gpus else "cpu")
    method = position_method(shape)
    # On a device that is not here, what can run is only known when it does.
    impl = shape.attention
    if impl == "auto":
        impl = ", else ".join(preferences(device.type, gradients=True))
    tokens = batch.global_ * config.seq_length
    gigabytes = training_bytes(config, shape, batch.micro, ranks) / 1e9
    sharing = shape.position_sharing or method.sharing
    lines = {
        "run": f"{config.save_dir} (configuration {config_sha(config)})",
        "model": f"{parameter_count(shape):,} parameters, vocabulary {shape.vocabulary:,} (padded)",
        "method": f"{method.name} ({method.tier}), shared by {sharing}, options "
        + (", ".join(f"{k}={v}" for k, v in method.settings()["options"].items()) or "none"),
        "attention": f"{impl} on {device.type}, {config.torch_dtype_name}",
        "processes": f"{processes}, ZeRO stage {config.zero_stage}",
        "batch": f"{batch.micro} x {batch.accumulation} x {ranks} = {batch.global_} sequences of "
        f"{config.seq_length} = {tokens:,} tokens a step",
        "data": _data(config),
        "training": f"{config.train_iters:,} steps, {tokens * config.train_iters:,} tokens",
        "memory": f"about {gigabytes:.1f} GB a process (an estimate, activations included)",
        "evaluation": f"{config.eval_protocol} at {', '.join(map(str, config.eval_lengths))}",
    }
    first = preferences(device.type, gradients=True)[0] if shape.attention == "auto" else impl
    peak = attention_bytes(
        shape,
        first,
        batch.micro,
        config.seq_length,
        itemsize=BYTES[config.torch_dtype_name],
        gradients=True,
        whole_rows=method.whole_rows,
        device=device.type,
    )
    lines["attention peak"] = (
        f"about {peak / 1e6:.0f} MB a layer in training, above q, k and v ({first})"
    )
    width = max(map(len, lines))
    return dump(config) + "\n" + "".join(f"{k:<{width}}  {v}\n" for k, v in lines.items())
