"""Damage to JSON, JSON lines, YAML and CSV that leaves them what they are."""

from __future__ import annotations

import json
import random
from typing import Any

from fuzz_values import MARKUP, NAMES, NUMBERS, TOKENS, any_json

DEEP = 20_000


def changed_json(data: bytes, draw: random.Random) -> bytes:
    """A value replaced, removed, renamed, given twice, or buried deep."""
    root = [json.loads(data)]
    holder, key = _place(root, draw)
    kind = draw.random()
    if kind < 0.45:
        holder[key] = any_json(draw)
    elif kind < 0.6:
        holder[key] = _alike(holder[key], draw)
    elif kind < 0.7 and holder is not root:
        del holder[key]
    elif kind < 0.76 and isinstance(holder, dict):
        holder[draw.choice(NAMES + MARKUP)] = holder.pop(key)
    elif kind < 0.82 and isinstance(holder, dict):
        return _twice(root, holder, key, draw)
    elif kind < 0.88:
        mark = "\u2603fuzz"
        holder[key] = mark
        deep = "[" * DEEP + "]" * draw.choice((0, DEEP))
        return _text(root[0]).replace(f'"{mark}"', deep).encode("utf-8", "surrogatepass")
    elif isinstance(holder, list) and holder is not root:
        draw.shuffle(holder)
    else:
        other, name = _place(root, draw)
        holder[key] = json.loads(_text(other[name]))  # a copy, or it might hold itself
    return _text(root[0]).encode("utf-8", "surrogatepass")


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _place(root: list[Any], draw: random.Random) -> tuple[Any, Any]:
    """A container and a key in it; shallow places are likelier than their number says."""
    holder, key = root, 0
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.8:
        holder = holder[key]
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
    return holder, key


def _alike(value: Any, draw: random.Random) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return draw.choice((value + 1, -value, value * 1.0000001, *draw.sample(NUMBERS, 2)))
    if isinstance(value, str):
        return draw.choice((*draw.sample(NAMES, 2), *draw.sample(MARKUP, 3), value + " "))
    return type(value)()


def _twice(root: list[Any], holder: dict[str, Any], key: str, draw: random.Random) -> bytes:
    mark = "\u2603fuzz"
    holder[mark] = any_json(draw)
    return _text(root[0]).replace(f'"{mark}"', _text(key), 1).encode("utf-8", "surrogatepass")


def changed_lines(data: bytes, draw: random.Random) -> bytes:
    """A line of JSON changed, removed, given twice, or in another place."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    kind = draw.random()
    if kind < 0.75:
        lines[at] = changed_json(lines[at], draw)
    elif kind < 0.8:
        del lines[at]
    elif kind < 0.9:
        lines.insert(draw.randrange(len(lines)), lines[at])
    else:
        lines.insert(at, draw.choice(TOKENS))
    return b"\n".join(lines)


def changed_yaml(data: bytes, draw: random.Random) -> bytes:
    """A value, a key or an indent changed, a line given twice, or a bomb of aliases put in."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    key, colon, value = lines[at].partition(b":")
    kind = draw.random()
    if kind < 0.35:
        lines[at] = key + b": " + _yaml_value(draw)
    elif kind < 0.45:
        lines[at] = draw.choice(TOKENS) + colon + value
    elif kind < 0.55:
        lines.insert(draw.randrange(len(lines)), lines[at])
    elif kind < 0.65:
        del lines[at]
    elif kind < 0.75:
        lines[at] = b" " * draw.choice((1, 2, 8)) + lines[at]
    elif kind < 0.8:
        lines.insert(at, b"x: &x [" + b"y, " * 9 + b"]\nz: &z [" + b"*x, " * 9 + b"]")
    elif kind < 0.85:
        lines[at] = key + b": " + draw.choice((b"[", b"{a: ", b"- ", b"? ")) * DEEP
    else:
        lines[at] = key + colon + draw.choice(TOKENS) + value
    return b"\n".join(lines)


def _yaml_value(draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return str(draw.choice(NUMBERS)).encode()
    return _text(any_json(draw)).encode("utf-8", "surrogatepass")


def changed_csv(data: bytes, draw: random.Random) -> bytes:
    """A cell or a line changed."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    cells = lines[at].split(b",")
    kind = draw.random()
    if kind < 0.6:
        new = (*TOKENS, *(str(n).encode() for n in NUMBERS))
        cells[draw.randrange(len(cells))] = draw.choice(new)
    elif kind < 0.7:
        cells.pop(draw.randrange(len(cells)))
    elif kind < 0.8:
        lines.insert(draw.randrange(len(lines)), lines[at])
    else:
        draw.shuffle(cells)
    lines[at] = b",".join(cells)
    return b"\n".join(lines)
