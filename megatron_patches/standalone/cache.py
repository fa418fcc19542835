"""What a model keeps of a text that it reads piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from megatron_patches.positions import PositionMethod


@dataclass
class Cache:
    """Keys and values of the tokens read so far, one pair `[B, H, length, D]` a layer.

    Beside them the log decays `[B, H, length]` of methods with gates.
    """

    keys: list[Tensor | None]
    values: list[Tensor | None]
    log_decays: list[Tensor | None]
    length: int = 0

    @classmethod
    def empty(cls, layers: int) -> Cache:
        return cls([None] * layers, [None] * layers, [None] * layers)


@contextmanager
def planned(methods: Sequence[PositionMethod], tokens: int) -> Iterator[None]:
    """A text of `tokens` tokens, padding included, is going to be read piece by piece.

    Methods whose places follow the length of the text then put every piece, and a shorter text, where
    the whole one has it.
    """
    for method in methods:
        method.planned_length = tokens
    try:
        yield
    finally:
        for method in methods:
            method.planned_length = None


def check_plan(methods: Sequence[PositionMethod]) -> None:
    """Raises ValueError if a text cannot be read with a cache, for its length is not known."""
    for method in methods:
        if method.follows_length and method.planned_length is None:
            raise ValueError(
                f"with {method.name} a token's place follows the length of the whole text: read it with a "
                "cache inside `planned(methods, tokens)`"
            )
