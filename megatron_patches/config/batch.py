"""Micro batch, accumulation and global batch: NeoX's rule, with the numbers in the message."""

from __future__ import annotations

from typing import NamedTuple

from .errors import ConfigError
from .schema import Config

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Batch(NamedTuple):
    """Sequences: `micro` a process and pass, times `accumulation`, times processes is `global_`."""

    micro: int
    accumulation: int
    global_: int


def batch_arithmetic(config: Config, world_size: int) -> Batch:
    """Completes the batch keys for `world_size` data-parallel processes.

    Two of the three keys give the third; a batch size alone means one accumulation step.
    Raises ConfigError where none is set or where the numbers do not multiply.
    """
    if world_size < 1:
        raise ConfigError(
            f"the number of data-parallel processes must be at least 1, not {world_size}"
        )
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if total is None and micro is None:
        raise ConfigError("set `train_micro_batch_size_per_gpu` or `train_batch_size`")
    if total is None:
        assert micro is not None
        steps = accumulation or 1
        return Batch(micro, steps, micro * steps * world_size)
    if micro is not None and accumulation is None:
        accumulation = total // (micro * world_size)
    accumulation = 1 if accumulation is None else accumulation
    if micro is None:
        micro = total // (accumulation * world_size)
    if micro * accumulation * world_size != total:
        raise ConfigError(_mismatch(config, world_size, total))
    return Batch(micro, accumulation, total)


def data_parallel_size(config: Config, processes: int) -> int:
    """How many of `processes` see different data: the rest share a model by stage or by tensor.

    Raises ConfigError where the stages and shards do not divide the processes.
    """
    shards = max(1, config.pipe_parallel_size) * config.model_parallel_size
    if processes < 1 or processes % shards:
        raise ConfigError(
            f"{processes} processes do not divide into {config.place('pipe_parallel_size')}"
            f" {config.pipe_parallel_size} times {config.place('model_parallel_size')}"
            f" {config.model_parallel_size}"
        )
    return processes // shards


def _mismatch(config: Config, world_size: int, total: int) -> str:
    factors = [
        f"{config.place(key)} {value}"
        for key in KEYS[1:]
        if (value := getattr(config, key)) is not None
    ]
    factors.append(f"{world_size} data-parallel process{'es' if world_size > 1 else ''}")
    return (
        f"{config.place('train_batch_size')} {total} is not a whole multiple of "
        f"{' times '.join(factors)}"
        if len(factors) < 3
        else f"{config.place('train_batch_size')} {total} is not {' times '.join(factors)}"
    )
