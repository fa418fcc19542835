"""What a model keeps of a text that it reads piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
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


def check_plan(
    methods: Sequence[PositionMethod], cache: Cache | None, padding_BK: Tensor | None
) -> None:
    """Raises ValueError if a text cannot be read with a cache, for its length is not known, or in a batch."""
    check_padding(methods[0], padding_BK)
    for method in methods:
        if cache is not None and method.follows_length and method.planned_length is None:
            raise ValueError(
                f"with {method.name} a token's place follows the length of the whole text: read it with a "
                "cache inside `planned(methods, tokens)`"
            )


def check_padding(method: PositionMethod, padding_BK: Tensor | None) -> None:
    """Raises ValueError if rows of a batch would not be read as they are alone.

    One length is planned, and one stretch of distances drawn, for all rows: rows with padding are shorter.
    """
    if method.follows_length and padding_BK is not None and bool(padding_BK.any()):
        raise ValueError(
            f"with {method.name} a token's place follows the length of the whole text: a batch has no "
            "padding; give texts of different lengths one by one"
        )


def positions_of(tokens_BL: Tensor, start: int, padding_BK: Tensor | None) -> Tensor:
    """Absolute positions of tokens after `start` others: [L], with padding [B, L], 0 under what is left."""
    if padding_BK is not None:
        return ((~padding_BK).cumsum(1) - 1).clamp(min=0)[:, start:]
    return torch.arange(start, start + tokens_BL.shape[1], device=tokens_BL.device)
