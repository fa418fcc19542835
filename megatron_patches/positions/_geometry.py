"""The sizes that a position method is built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What torch's generators take; the last one is left for a method that needs a second seed.
FIRST_SEED, LAST_SEED = -(1 << 63), (1 << 64) - 2


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The model around a method. Raises ValueError for impossible sizes.

    `heads` counts the whole model's; `head_range = (first, count)` are those owned here.
    """

    heads: int
    head_dim: int
    hidden_size: int
    max_length: int | None = None
    seed: int = 0
    head_range: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for key in ("heads", "head_dim", "hidden_size", "seed"):
            if not _is_integer(getattr(self, key)):
                raise ValueError(f"{key} must be an integer, not {getattr(self, key)!r}")
        for key in ("heads", "head_dim", "hidden_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if not FIRST_SEED <= self.seed <= LAST_SEED:
            raise ValueError(f"seed must lie in [-2**63, 2**64 - 2], not {self.seed}")
        length, share = self.max_length, self.head_range
        if length is not None and (not _is_integer(length) or length < 1):
            raise ValueError(f"max_length must be an integer of at least 1 or None, not {length!r}")
        pair = isinstance(share, tuple | list) and len(share) == 2
        if share is not None and not (pair and all(map(_is_integer, share))):
            raise ValueError(
                f"head_range must be (first, count), two integers, or None, not {share!r}"
            )
        first, count = self.owned
        if first < 0 or count < 1 or first + count > self.heads:
            raise ValueError(
                f"head_range (first {first}, count {count}) does not lie within {self.heads} heads"
            )

    @property
    def owned(self) -> tuple[int, int]:
        """`(first, count)` of the heads owned here."""
        return (0, self.heads) if self.head_range is None else self.head_range


def _is_integer(value: Any) -> bool:
    """Truth values count as none, although Python has them among its integers."""
    return isinstance(value, int) and not isinstance(value, bool)
