"""Reading one YAML file of flat NeoX keys, so that nothing in it means other than it looks.

YAML 1.1, which NeoX reads, has `010` for eight, `1:30` for ninety, `off` for false and `6e-4` for a
text, and lets a later key silently replace an earlier one. Here each of these is an error or, where
the answer depends on the key's type (`off`, `6e-4`), kept as it is until the type is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError
from .keys_base import names

# The longest shipped file has 10 kilobytes, and the pure Python scanner reads some 100 a second.
MAX_BYTES = 1 << 20
MOST_DIGITS = 100  # Python itself refuses 4300
MOST_DEEP = 32  # lists and mappings inside each other; the keys need four

PLAIN = re.compile(r"[A-Za-z_][\w./+=-]*")
YAML_WORDS = names("y n yes no on off true false null")
DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
TAG = "tag:yaml.org,2002:"


class YesNo(str):
    """A plain `yes`, `no`, `on` or `off`: a boolean where one is wanted, an accident elsewhere."""

    __slots__ = ()

    @property
    def truth(self) -> bool:
        return self.lower() in ("yes", "on")


@dataclass(frozen=True)
class Entry:
    """A top-level key of one file: `where` is file:line; `lines` has it for dotted nested paths."""

    key: str
    value: Any
    where: str
    lines: dict[str, str] = field(default_factory=dict)


def normal(key: str) -> str:
    """NeoX's spelling of a key: underscores."""
    return key.replace("-", "_")


def read_file(path: Path) -> list[Entry]:
    """The keys of `path` in order, repeated ones included.

    Raises ConfigError for a file that is missing, empty, not YAML, not a mapping, or that holds
    anchors, aliases, merge keys, tags or scalars that YAML 1.1 reads otherwise than they look.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the name
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES} characters, which no configuration has")
    return read_text(text, str(path))


def read_text(text: str, name: str) -> list[Entry]:
    """As `read_file`, for YAML text; `name` stands for the file in messages."""
    root = _parse(text, name)
    if root is None:
        raise ConfigError(f"{name}: the file sets no key")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}:{_line(root)}: expects `key: value` lines, not {_kind(root)}")
    problems: list[str] = []
    entries = []
    for key_node, value_node in root.value:
        where = f"{name}:{_line(key_node)}"
        lines: dict[str, str] = {}
        key = normal(_key(key_node, where, problems))
        value = _value(value_node, name, key, lines, problems)
        entries.append(Entry(key, value, where, lines))
    if problems:
        raise ConfigError.of(problems)
    if not entries:
        raise ConfigError(f"{name}: the file sets no key")
    return entries


def read_override(text: str, option: str = "--set") -> Entry:
    """The entry of one `key=value` from the command line; the value is YAML, the key may be dotted.

    `option` names it in messages. Raises ConfigError for a text without `=` or key, and for a value that
    `read_file` refuses.
    """
    key, equals, value_text = text.partition("=")
    top, dot, inner = key.strip().partition(".")
    key = normal(top) + dot + inner  # as in a file: names inside a mapping have one spelling
    if not equals or not key:
        raise ConfigError(f"{option} {text}: expects key=value")
    problems: list[str] = []
    root = _parse(value_text, f"{option} {key}")
    value = None if root is None else _value(root, f"{option} {key}", key, {}, problems)
    if problems:
        raise ConfigError.of(problems)
    return Entry(key, value, option)


class _Loader(yaml.SafeLoader):
    """Composes nodes and refuses what makes one place in the file depend on another."""

    deep = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if self.deep > MOST_DEEP:
            raise _Refused(event, f"a value inside {MOST_DEEP} others", "make it flat")
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(event, f"alias `*{event.anchor}`")
        if event.anchor is not None:
            raise _Refused(event, f"anchor `&{event.anchor}`")
        if event.tag is not None:
            raise _Refused(event, f"tag `{event.tag}`")
        if isinstance(event, yaml.ScalarEvent):
            event.value = _whole(event)
        self.deep += 1
        node = super().compose_node(parent, index)
        self.deep -= 1
        return node


class _Refused(Exception):
    def __init__(self, event: Any, what: str, advice: str = "write the value where it is used"):
        self.line, self.what, self.advice = event.start_mark.line + 1, what, advice


def _whole(event: yaml.ScalarEvent) -> str:
    """The text of a scalar, with characters that JSON escapes in two halves put together."""
    text: str = event.value
    if text.isascii():
        return text
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        advice = "write the character itself"
        raise _Refused(event, "half of a character (U+D800 to U+DFFF)", advice) from None


def _parse(text: str, name: str) -> Any:
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except _Refused as error:
        message = f"{name}:{error.line}: {error.what} is refused: {error.advice}"
        raise ConfigError(message) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    except (ValueError, OverflowError):  # PyYAML's own, of a number that is no character's
        line = f":{loader.line + 1}" if loader else ""
        what = "an escape names no character: write the character itself"
        raise ConfigError(f"{name}{line}: not valid YAML: {what}") from None


def _key(node: Any, where: str, problems: list[str]) -> str:
    if not isinstance(node, yaml.ScalarNode):
        problems.append(f"{where}: a key must be one word, not {_kind(node)}")
        return ""
    if node.tag == TAG + "merge":
        problems.append(f"{where}: merge key `<<` is refused: write the keys out")
    return str(node.value)


def _value(node: Any, name: str, path: str, lines: dict[str, str], problems: list[str]) -> Any:
    where = f"{name}:{_line(node)}" if not name.startswith("--") else name
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, name, path, lines, problems) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, name, path, lines, problems)
    try:
        return _scalar(node)
    except ValueError as error:
        shown = node.value if len(node.value) <= 60 else node.value[:57] + "..."
        problems.append(f"{where}: `{path}: {shown}` {error}")
        return None


def _mapping(
    node: yaml.MappingNode, name: str, path: str, lines: dict[str, str], problems: list[str]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{name}:{_line(key_node)}"
        key = _key(key_node, where, problems)
        dotted = f"{path}.{key}"
        if key in result:
            problems.append(f"{where}: `{dotted}` is set twice (first at {lines[dotted]})")
        lines.setdefault(dotted, where)
        result[key] = _value(value_node, name, dotted, lines, problems)
    return result


def _scalar(node: yaml.ScalarNode) -> Any:
    """The value of a scalar; ValueError, the end of a sentence, if it is not what it looks."""
    text = node.value
    kind = node.tag.removeprefix(TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true" if text.lower() in ("true", "false") else YesNo(text)
    if kind in ("int", "float") and ":" in text:
        raise ValueError("is read by YAML 1.1 as a number to the base 60: quote a text")
    if kind == "int":
        if not DECIMAL.fullmatch(text):
            raise ValueError(
                "is read by YAML 1.1 to the base 8, 16 or 2: write it decimal, or quote a text"
            )
        if len(text) > MOST_DIGITS:
            raise ValueError(f"has more than {MOST_DIGITS} digits")
        return int(text.replace("_", ""))
    if kind == "float":
        return float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    if kind == "timestamp":
        raise ValueError("is read by YAML 1.1 as a date: quote a text")
    return text


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _kind(node: Any) -> str:
    kinds = {yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list"}
    return kinds.get(type(node), "a single value")


def duplicates(entries: Sequence[Entry]) -> list[str]:
    """One line for each key that several entries set, whatever its spelling."""
    first: dict[str, Entry] = {}
    problems = []
    for entry in entries:
        if entry.key in first:
            before = first[entry.key].where
            problems.append(f"{entry.where}: `{entry.key}` is set twice (first at {before})")
        first.setdefault(entry.key, entry)
    return problems


def flow_yaml(value: Any) -> str:
    """A value as `read_override` reads it: flow YAML, with floats that YAML 1.1 takes for floats."""
    if isinstance(value, YesNo):
        return str(value)
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow_yaml, value)) + "]"
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in YAML_WORDS:
        return value
    return json.dumps(value)
