"""What the standalone engine cannot honour is refused here, before anything starts."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from pydantic import BaseModel

from .errors import ConfigError
from .keys_base import Only
from .keys_model import ORDINARY_ATTENTION, Attention, Shape, attention_types
from .keys_refused import RefusedModel
from .schema import Config

# Dropout is off where a model is only read.
TRAINING_ONLY = frozenset({"hidden_dropout", "attention_dropout"})
READING = frozenset(
    {*Shape.model_fields, *Attention.model_fields, *RefusedModel.model_fields} - TRAINING_ONLY
)


def check_standalone(config: Config, *, training: bool = True) -> None:
    """Raises ConfigError that lists every key whose value would change what the engine computes.

    `training=False` looks at the keys that decide what a trained model computes, whoever trained it.
    """
    problems = [*_marked(config, config, ""), *_special(config), *_training(config)]
    if not training:
        problems = [*_marked(config, config, "", READING), *_special(config)]
    if problems:
        raise ConfigError.of(problems)


def _marked(
    config: Config, group: BaseModel, prefix: str, keys: Container[str] | None = None
) -> Iterator[str]:
    """Lines for the keys marked `Only`, nested groups included; `keys` limits the outermost ones."""
    for key, info in type(group).model_fields.items():
        if keys is not None and key not in keys:
            continue
        value = getattr(group, key)
        if isinstance(value, BaseModel):
            yield from _marked(config, value, f"{prefix}{key}.")
        for mark in info.metadata:
            if isinstance(mark, Only) and value not in mark.values:
                yield _line(config, prefix + key, value, mark.why, mark.values)


def _special(config: Config) -> Iterator[str]:
    kinds = attention_types(config.attention_config) - ORDINARY_ATTENTION
    if kinds:
        why = "it has its own attention: leave this key out and choose with `attention_impl`"
        yield _line(config, "attention_config", sorted(kinds), why)
    heads = config.num_kv_heads
    if heads not in (None, config.num_attention_heads):
        why = "each query head has its own key and value head"
        yield _line(config, "num_kv_heads", heads, why, (config.num_attention_heads,))


def _training(config: Config) -> Iterator[str]:
    if not config.train_iters:
        why = "it trains; eval.py evaluates a checkpoint"
        yield f"{_line(config, 'train_iters', 0, why)} (it takes 1 and above)"
    if config.iteration is not None and config.load is None:
        why = "it names the step of a `load`, and a run of its own goes on from the newest"
        yield _line(config, "iteration", config.iteration, why, (None,))


def _line(config: Config, key: str, value: Any, why: str, values: tuple[Any, ...] = ()) -> str:
    legal = ", ".join("unset" if item is None else _yaml(item) for item in values)
    choice = f" (it takes {legal})" if legal else ""
    return f"{config.place(key)}: the standalone engine cannot honour {_yaml(value)}: {why}{choice}"


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
