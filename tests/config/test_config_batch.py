"""Batch arithmetic: two numbers give the third, or a message with the numbers and the keys."""

from __future__ import annotations

import pytest

from megatron_patches.config import ConfigError, batch_arithmetic, data_parallel_size

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def overrides(total, micro, accumulation):
    numbers = zip(KEYS, (total, micro, accumulation), strict=True)
    return [f"{key}={number}" for key, number in numbers if number is not None]


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ((None, 4, None), 1, (4, 1, 4)),
        ((None, 4, None), 3, (4, 1, 12)),
        ((None, 4, 2), 3, (4, 2, 24)),
        ((32, None, None), 4, (8, 1, 32)),
        ((32, 4, None), 2, (4, 4, 32)),
        ((32, None, 4), 2, (4, 4, 32)),
        ((32, 8, 4), 1, (8, 4, 32)),
    ],
)
def test_two_numbers_give_the_third(config, given, world, expected):
    batch = batch_arithmetic(config("", *overrides(*given)), world)
    assert batch == expected
    assert (batch.micro, batch.accumulation, batch.global_) == expected


@pytest.mark.parametrize(
    ("given", "world", "parts"),
    [
        ((32, None, None), 5, ["32", "5 data-parallel processes"]),
        ((32, None, None), 64, ["32", "64 data-parallel processes"]),
        (
            (32, 5, None),
            2,
            ["`train_micro_batch_size_per_gpu` (--set) 5", "2 data-parallel processes"],
        ),
        (
            (32, 64, None),
            1,
            ["`train_micro_batch_size_per_gpu` (--set) 64", "1 data-parallel process"],
        ),
        ((32, None, 3), 2, ["`gradient_accumulation_steps` (--set) 3"]),
        (
            (32, 8, 2),
            1,
            ["is not `train_micro_batch_size_per_gpu` (--set) 8 times", "(--set) 2 times 1"],
        ),
    ],
)
def test_numbers_that_do_not_multiply_are_refused(config, given, world, parts):
    with pytest.raises(ConfigError) as caught:
        batch_arithmetic(config("", *overrides(*given)), world)
    message = str(caught.value)
    assert message.startswith("`train_batch_size` (--set) 32 is not")
    for part in parts:
        assert part in message


@pytest.mark.parametrize("given", [(None, None, None), (None, None, 4)])
def test_no_batch_size_is_refused(config, given):
    with pytest.raises(ConfigError, match="set `train_micro_batch_size_per_gpu` or"):
        batch_arithmetic(config("", *overrides(*given)), 1)


@pytest.mark.parametrize("override", [f"{key}={bad}" for key in KEYS for bad in (0, -1, 1.5)])
def test_batch_keys_are_positive_whole_numbers(refusal, override):
    assert override.partition("=")[0] in refusal("", override)


def test_a_world_without_processes_is_refused(config):
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        batch_arithmetic(config("", "train_batch_size=4"), 0)


def test_data_parallel_size_divides_by_stages_and_shards(config):
    made = config("", "pipe_parallel_size=2", "model_parallel_size=2")
    assert data_parallel_size(made, 8) == 2
    assert data_parallel_size(config("", "pipe_parallel_size=0"), 3) == 3
    with pytest.raises(ConfigError, match="6 processes do not divide.*--set. 2 times.*--set. 2"):
        data_parallel_size(made, 6)
    with pytest.raises(ConfigError, match="1 processes do not divide"):
        data_parallel_size(config("", "pipe_parallel_size=2"), 1)
