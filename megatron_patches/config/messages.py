"""Turning what pydantic found into one sentence about a key, a place and what to write."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

NUMBER = re.compile(r"([-+]?)(?=\.?\d)(\d*)(?:\.(\d*))?(?:[eE]([-+]?)(\d+))?")
KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}

MISSING = "no file sets the required"  # how the line on missing keys begins


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown `name`: the closest known ones, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; nearest: {', '.join(f'`{item}`' for item in near)}" if near else ""


def takes_boolean(model: type[BaseModel], key: str) -> bool:
    """Whether the key's type admits true and false."""
    return _admits(model.model_fields[key].annotation, bool)


def _admits(annotation: Any, wanted: type) -> bool:
    if annotation is wanted:
        return True
    if get_origin(annotation) is Literal:
        return False
    return any(_admits(part, wanted) for part in get_args(annotation))


def field_problems(
    model: type[BaseModel], details: Sequence[Any], places: Mapping[str, str]
) -> list[str]:
    """The lines for pydantic's findings; missing keys share one."""
    missing = []
    lines = []
    numbers = {detail["loc"][0] for detail in details if detail["type"] == "float_type"}
    for detail in details:
        if detail["type"] == "missing":
            missing.append(f"`{_path(model, detail['loc'])}`")
        # Where both kinds of number would do, the wider one is the answer.
        elif not (detail["type"] == "int_type" and detail["loc"][0] in numbers):
            lines.append(_field_problem(model, detail, places))
    if missing:
        lines.append(f"{MISSING} {', '.join(missing)}")
    return [line for line in lines if line]


def _field_problem(model: type[BaseModel], detail: Any, places: Mapping[str, str]) -> str:
    """The line for one of pydantic's findings; "" for one that only follows from another."""
    kind = detail["type"]
    if kind == "default_factory_not_called":
        return ""
    path = _path(model, detail["loc"])
    where = places.get(path) or places.get(path.partition(".")[0], "default")
    if kind == "extra_forbidden":
        *above, key = detail["loc"]  # the key itself may have dots
        known = _model_at(model, _path(model, tuple(above))).model_fields
        return f"{where}: unknown key `{path}`{nearest(str(key), known)}"
    return f"{where}: {_sentence(path, detail)}"


def _path(model: type[BaseModel], location: tuple[Any, ...]) -> str:
    """Dotted keys of a location; list positions and the branches of a union are left out."""
    keys: list[str] = []
    current: Any = model
    for step in location:
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            break
        keys.append(str(step))
        known = current.model_fields.get(str(step))
        current = _group(known.annotation) if known else None
    return ".".join(keys)


def _group(annotation: Any) -> Any:
    """The model in `Model | None`, else the annotation itself."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    found = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    return found[0] if found else annotation


def _model_at(model: type[BaseModel], path: str) -> type[BaseModel]:
    """The model of the group at a dotted path, "" for the whole."""
    for step in path.split(".") if path else ():
        inner = _group(model.model_fields[step].annotation)
        assert isinstance(inner, type) and issubclass(inner, BaseModel)
        model = inner
    return model


def _sentence(path: str, detail: Any) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    shown = f"`{path}: {_show(value)}`"
    if kind in KINDS:
        return f"{shown} expects {KINDS[kind]}, not {_kind_of(value)}{_advice(kind, value)}"
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "")
        return f"{shown} must be one of {choices}{nearest(str(value), _words(choices))}"
    if kind == "value_error":
        return f"{shown} {context['error']}"
    if kind == "finite_number":
        return f"{shown} expects a finite number"
    if kind == "string_pattern_mismatch":
        letters = str(context["pattern"]).rpartition("[")[2].partition("]")[0]
        return f"{shown} may hold only {letters} and must begin with a letter or a digit"
    return f"{shown} {re.sub('^(Input|List) should', 'must', str(detail['msg']))}"


def _words(choices: str) -> list[str]:
    return re.split(r", | or ", choices)


def _advice(kind: str, value: Any) -> str:
    """What to write instead of a text that looks like a number."""
    match = NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if kind not in ("int_type", "float_type") or match is None:
        return ""
    sign, whole, part, exponent_sign, exponent = match.groups()
    whole = whole.lstrip("0") or "0"
    if kind == "int_type":
        if len(match.group()) > 40 or len(exponent or "") > 3:
            return ""  # Decimal has limits of its own
        number = Decimal(match.group())
        short = number.adjusted() < 20 and number == number.to_integral_value()
        return f": write {int(number)}" if short else ""
    if exponent is None:
        return f": write {sign}{whole}.{part or 0} without quotes"
    return (
        f": write {sign}{whole}.{part or 0}e{exponent_sign or '+'}{exponent}, with a dot and a sign"
    )


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind_of(value: Any) -> str:
    kinds = {bool: "a boolean", int: "a whole number", float: "a number with a fraction"}
    kinds |= {str: "a text", list: "a list", dict: "a mapping", type(None): "nothing"}
    return kinds.get(type(value), "this")
