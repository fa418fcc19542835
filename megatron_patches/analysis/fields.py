"""Checks of single fields, shared by the row types. Each raises RowError naming the field."""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from megatron_patches.analysis.jsonl import CONTROL, RowError, dump, parse

T = TypeVar("T")
# What programs have said may hold anything; it is spelt out where it is shown.
TOLD = ("message", "command")


def text(name: str, value: Any) -> str:
    """A non-empty string."""
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{name}: expected text, got {value!r}")
    if name not in TOLD and CONTROL.search(value):
        raise RowError(f"{name}: control characters in {value!r}")
    return value


def integer(name: str, value: Any, least: int) -> int:
    """An integer (numpy's too, bool not) of at least ``least`` and 63 bits, as a plain int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise RowError(f"{name}: expected an integer >= {least}, got {value!r}")
    # Whatever is divided or drawn later becomes a float, which larger ones may not fit.
    whole = int(value)
    if whole > sys.maxsize:
        raise RowError(f"{name}: expected an integer of 63 bits, got one of {whole.bit_length()}")
    return whole


def _bits(value: Any) -> int:
    return int(value).bit_length()


def number(name: str, value: Any, least: float = -math.inf) -> float:
    """A finite real number (numpy's too, bool not) of at least ``least``, as a plain float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RowError(f"{name}: expected a number, got {value!r}")
    try:
        result = float(value)
    except OverflowError:
        # An integer of JSON may have any number of digits.
        raise RowError(f"{name}: does not fit a float: an integer of {_bits(value)} bits") from None
    if not math.isfinite(result) or result < least:
        bound = "" if least == -math.inf else f" >= {least:g}"
        raise RowError(f"{name}: expected a finite number{bound}, got {value!r}")
    return result


def numbers_list(name: str, values: Any, least: float = -math.inf) -> list[float]:
    """A list (or tuple) of finite numbers, as a new list of plain floats."""
    if not isinstance(values, list | tuple):
        raise RowError(f"{name}: expected a list of numbers, got {type(values).__name__}")
    return [number(f"{name}[{index}]", value, least) for index, value in enumerate(values)]


def json_mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping with text keys and JSON values, copied; it reads back from JSON as it is."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RowError(f"{name}: expected a mapping with text keys, got {value!r}")
    try:
        copy = parse(dump(dict(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{name}: not strict JSON: {error}") from error
    if any(CONTROL.search(found) for found in _texts(copy)):
        raise RowError(f"{name}: control characters in {value!r}")
    return dict(copy)


def _texts(value: Any) -> Iterator[str]:
    """All keys and texts of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def from_object(cls: type[T], where: str, record: Mapping[str, Any]) -> T:
    """Build the dataclass ``cls`` from one JSON object; RowError starts with ``where``.

    Every field has to be there and nothing else: a key that is skipped or made up would mean
    that writer and reader disagree about what was measured. Older files may lack the fields that
    ``cls.ADDED`` lists.
    """
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    needed = known - set(getattr(cls, "ADDED", ()))
    missing, unknown = sorted(needed - record.keys()), sorted(record.keys() - known)
    if missing or unknown:
        parts = [f"missing {', '.join(missing)}"] if missing else []
        parts += [f"unknown {', '.join(unknown)}"] if unknown else []
        raise RowError(f"{where}: {'; '.join(parts)}")
    try:
        return cls(**record)
    except RowError as error:
        raise RowError(f"{where}: {error}") from error
