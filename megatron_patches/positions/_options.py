"""Checks of the values of options: what a YAML file gives may be of any type.

Each returns its value, or raises ValueError with the method's name, the option and the value. Text that
looks like a truth value is refused: as a condition, "false" would count as true.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def truth(name: str, option: str, value: Any) -> bool:
    """True or False, nothing that only counts as one of them."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {option}={value!r} must be true or false, without quotes")
    return value


def whole(name: str, option: str, value: Any) -> int:
    """An integer; its range is for the caller to check."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: {option}={value!r} must be an integer")
    return value


def at_least(name: str, option: str, value: Any, least: int) -> int:
    """An integer that is not below `least`."""
    if whole(name, option, value) < least:
        raise ValueError(f"{name}: {option}={value!r} must be an integer of at least {least}")
    return int(value)


def finite(name: str, option: str, value: Any) -> float:
    """A number that float32 holds, neither NaN nor infinite; its range is for the caller to check."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: {option}={value!r} must be a number")
    if not abs(value) <= 3.4e38:  # so for NaN, and for integers beyond every float
        raise ValueError(f"{name}: {option}={value!r} must be a finite number below 3.4e38")
    return value


def choice(name: str, option: str, value: Any, among: Collection[str]) -> str:
    """One of the words `among`."""
    if not isinstance(value, str) or value not in among:
        raise ValueError(f"{name}: {option}={value!r} is none of {', '.join(among)}")
    return value
