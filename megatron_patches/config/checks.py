"""Combinations of keys that cannot run in any engine, named before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from .keys_model import attention_types
from .schema import Config

PARTS = ("train", "valid", "test")


def impossible(config: Config) -> list[str]:
    """One line for each combination that no engine can run."""
    return [
        *_shape(config),
        *_schedule(config),
        *_precision(config),
        *_data(config),
        *_evaluation(config),
    ]


def _shape(config: Config) -> Iterator[str]:
    heads = config.num_attention_heads
    # Mamba's blocks have no heads, and NeoX's own files for it do not divide.
    if config.hidden_size % heads and "mamba" not in attention_types(config.attention_config):
        yield (
            f"{config.place('hidden_size')} {config.hidden_size} is not divisible by "
            f"{config.place('num_attention_heads')} {heads}"
        )
    if config.seq_length > config.max_position_embeddings:
        yield (
            f"{config.place('seq_length')} {config.seq_length} is longer than "
            f"{config.place('max_position_embeddings')} {config.max_position_embeddings}"
        )
    shared = config.num_kv_heads
    if shared is not None and heads % shared:
        yield (
            f"{config.place('num_attention_heads')} {heads} is not divisible by "
            f"{config.place('num_kv_heads')} {shared}"
        )
    if heads % config.model_parallel_size:
        yield (
            f"{config.place('num_attention_heads')} {heads} is not divisible by "
            f"{config.place('model_parallel_size')} {config.model_parallel_size}"
        )
    unique = config.num_unique_layers
    if unique is not None and config.num_layers % unique:
        yield (
            f"{config.place('num_layers')} {config.num_layers} is not divisible by "
            f"{config.place('num_unique_layers')} {unique}"
        )


def _schedule(config: Config) -> Iterator[str]:
    lr = config.optimizer.params.lr
    if config.min_lr > lr:
        peak = config.place("optimizer.params.lr")
        yield f"{config.place('min_lr')} {config.min_lr} is above {peak} {lr}"
    if config.train_epochs is not None and config.train_iters:
        yield f"{config.place('train_epochs')} and {config.place('train_iters')}: set one of them"
    if config.save and config.checkpoint_factor is None and config.extra_save_iters is None:
        yield (f"{config.place('save')} needs `checkpoint_factor` or `extra_save_iters` beside it")
    if config.checkpoint_scale == "log" and (config.checkpoint_factor or 2) <= 1:
        yield (
            f"{config.place('checkpoint_factor')} {config.checkpoint_factor} must be above 1 under "
            f"{config.place('checkpoint_scale')} log"
        )
    factor = config.checkpoint_factor
    if factor is not None and config.checkpoint_scale == "linear" and factor != int(factor):
        yield f"{config.place('checkpoint_factor')} {factor} must be a whole number of steps"


def _precision(config: Config) -> Iterator[str]:
    stage = (config.zero_optimization or {}).get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield f"{config.place('zero_optimization.stage')} must be 0, 1, 2 or 3, not {stage}"
    for key in ("fp16", "bf16"):
        enabled = (getattr(config, key) or {}).get("enabled", False)
        if not isinstance(enabled, bool):  # a text is true in Python, "false" as well
            where = config.place(f"{key}.enabled")
            yield f"{where} must be true or false without quotes, not {enabled!r}"
    claims = config.precision_claims
    if len(set(claims.values())) > 1:
        yield f"{config.place('fp16')} and {config.place('bf16')} are both enabled: use `precision`"
    for key, precision in claims.items():
        if config.precision not in (None, precision):
            yield (
                f"{config.place(key)} asks for {precision}, {config.place('precision')} for "
                f"{config.precision}"
            )


def _evaluation(config: Config) -> Iterator[str]:
    if config.eval_window is not None and config.eval_block is not None:
        yield f"{config.place('eval_window')} and {config.place('eval_block')}: set one of them"


def _data(config: Config) -> Iterator[str]:
    given = [part for part in PARTS if getattr(config, f"{part}_data_paths") is not None]
    if given and config.data_path is not None:
        other = config.place(f"{given[0]}_data_paths")
        yield f"{config.place('data_path')} and {other}: set one of them"
    for part in PARTS if given else ():
        if part not in given:
            yield f"{config.place(f'{given[0]}_data_paths')} needs `{part}_data_paths` beside it"
    for part in PARTS:
        paths = getattr(config, f"{part}_data_paths")
        if paths == []:
            yield f"{config.place(f'{part}_data_paths')} names no data"
        weights = getattr(config, f"{part}_data_weights")
        if weights is not None and len(weights) != len(paths or []):
            yield (
                f"{config.place(f'{part}_data_weights')} has {len(weights)} numbers for "
                f"{len(paths or [])} {config.place(f'{part}_data_paths')}"
            )
