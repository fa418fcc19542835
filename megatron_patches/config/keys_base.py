"""What the key groups are written with: a strict base model, number ranges, the mark `Only`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Positive: TypeAlias = Annotated[int, Field(gt=0)]
NonNegative: TypeAlias = Annotated[int, Field(ge=0)]
PositiveFloat: TypeAlias = Annotated[float, Field(gt=0)]
NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Table: TypeAlias = dict[str, Any]  # a nested mapping handed on to DeepSpeed or a tracker unread


class Keys(BaseModel):
    """A group of keys. Nothing is converted: the YAML must hold the type that the key has."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


@dataclass(frozen=True)
class Only:
    """Marks a key of which the standalone engine honours these values alone, and says why."""

    values: tuple[Any, ...]
    why: str


def names(text: str) -> frozenset[str]:
    """The words of `text`, for long lists of keys."""
    return frozenset(text.split())
