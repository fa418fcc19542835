"""Which keys a query sees besides causality: the last few, or its own block and the one before."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Sliding:
    """A query sees `width` keys, itself included: distance < width."""

    width: int

    @property
    def span(self) -> int:
        """The most keys that a query sees."""
        return self.width

    def first_key(self, position: int) -> int:
        """The first key that the query at `position`, or any later one, sees."""
        return max(0, position - self.width + 1)

    def visible(self, query_Q1: Tensor, key_K: Tensor) -> Tensor:
        """bool [Q, K] from positions; causality is not looked at."""
        return query_Q1 - key_K < self.width

    def queries_left(self, position: int) -> int | None:
        """How many queries from `position` on share their first key; None: the distance decides."""
        return None


@dataclass(frozen=True)
class Blockwise:
    """Blocks of `size` positions from the first key on: a query sees its own block and the one before.

    Sun et al.: A Length-Extrapolatable Transformer (arXiv 2212.10554), section 3.2, with blocks of half
    the training length. Padding takes part in the count: position 0 is the first key, padding or not.
    """

    size: int

    @property
    def span(self) -> int:
        """The most keys that a query sees."""
        return 2 * self.size

    def first_key(self, position: int) -> int:
        """The first key that the query at `position`, or any later one, sees: always a block's first."""
        return max(0, (position // self.size - 1) * self.size)

    def visible(self, query_Q1: Tensor, key_K: Tensor) -> Tensor:
        """bool [Q, K] from positions; causality is not looked at."""
        return query_Q1 // self.size - key_K // self.size <= 1

    def queries_left(self, position: int) -> int | None:
        """How many queries from `position` on share their first key: those of its block."""
        return self.size - position % self.size


Window: TypeAlias = Sliding | Blockwise
KINDS: dict[str, type[Sliding] | type[Blockwise]] = {"sliding": Sliding, "blockwise": Blockwise}


def window_of(given: Any) -> Window | None:
    """What `attend` calls a window: an integer, `(kind, tokens)`, or one of these classes; None: none.

    Raises ValueError.
    """
    if isinstance(given, Sliding):
        given = given.width
    elif isinstance(given, Blockwise):
        given = ("blockwise", given.size)
    if given is None:
        return None
    kind, tokens = given if isinstance(given, tuple) and len(given) == 2 else ("sliding", given)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"window kind {kind!r} is none of {', '.join(KINDS)}")
    try:
        if isinstance(tokens, bool):
            raise TypeError("a truth value")  # `index` takes it for 0 or 1
        count = operator.index(tokens)
    except TypeError as error:
        raise ValueError(
            f"window must be an integer, or a kind ({', '.join(KINDS)}) and an integer, got {given!r}"
        ) from error
    if count < 1:
        raise ValueError(
            f"window is the number of keys a query sees, or of a block, at least 1; got {count}"
        )
    return KINDS[kind](count)
