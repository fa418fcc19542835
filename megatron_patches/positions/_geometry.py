"""The sizes that a position method is built for."""

from __future__ import annotations

from dataclasses import dataclass


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
            if not isinstance(getattr(self, key), int):
                raise ValueError(f"{key} must be an integer, not {getattr(self, key)!r}")
        for key in ("heads", "head_dim", "hidden_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1 or None, not {self.max_length}")
        first, count = self.owned
        if first < 0 or count < 1 or first + count > self.heads:
            raise ValueError(
                f"head_range (first {first}, count {count}) does not lie within {self.heads} heads"
            )

    @property
    def owned(self) -> tuple[int, int]:
        """`(first, count)` of the heads owned here."""
        return (0, self.heads) if self.head_range is None else self.head_range
