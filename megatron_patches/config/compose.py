"""Plain union of YAML layers into one checked `Config`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .checks import impossible
from .errors import ConfigError
from .keys_base import names
from .keys_training import NESTED
from .messages import MISSING, field_problems, nearest, takes_boolean
from .reading import Entry, YesNo, duplicates, normal, read_file, read_override
from .schema import Config

# NeoX computes these from other keys and overwrites what a file says, silently.
DERIVED = {
    "lr": "optimizer.params.lr",
    "optimizer_type": "optimizer.type",
    "clip_grad": "gradient_clipping",
    "batch_size": "train_micro_batch_size_per_gpu",
    "zero_stage": "zero_optimization.stage",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "is_pipe_parallel": "pipe_parallel_size",
    "dynamic_loss_scale": "fp16.loss_scale",
}
# NeoX sets these while it runs.
RUNTIME = names(
    """
    world_size rank git_hash comet_experiment user_script config_files do_train do_valid do_test
    curriculum_seqlen
    """
)


def compose(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """The union of `files` (YAML mappings of NeoX keys), with `overrides` ("key=value") on top.

    Raises ConfigError, one line for each problem: a key set twice or unknown, a value of the wrong
    type, a combination that cannot run. Only an override may replace a key; dots reach into nested
    mappings.
    """
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    if not paths:
        raise ConfigError("no configuration file given")
    problems = _repeated_names(paths)
    entries: list[Entry] = []
    for path in paths:
        try:
            entries += read_file(path)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError.of(problems)
    return compose_entries(entries, overrides)


def from_mapping(values: Mapping[str, Any], name: str = "mapping") -> Config:
    """As `compose`, for keys that a program holds; `name` stands for the file in messages."""
    return compose_entries([Entry(normal(key), value, name) for key, value in values.items()])


def compose_entries(entries: Sequence[Entry], overrides: Sequence[str] = ()) -> Config:
    """As `compose`, for entries that are already read."""
    problems = duplicates(entries)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for entry in entries:
        problems += _unknown(entry)
        values.setdefault(entry.key, entry.value)
        places.setdefault(entry.key, entry.where)
        places.update(entry.lines)
    problems += _apply(overrides, values, places)
    values = {key: value for key, value in values.items() if key in Config.model_fields}
    for key in values:
        values[key] = _settle(key, values[key], places, problems)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        found = field_problems(Config, error.errors(include_url=False), places)
        read = ", ".join(dict.fromkeys(re.sub(r":\d+$", "", entry.where) for entry in entries))
        problems += [f"{x}; read: {read}" if x.startswith(MISSING) else x for x in found]
        raise ConfigError.of(problems) from None
    config.provenance.update(places)
    problems += impossible(config)
    if problems:
        raise ConfigError.of(problems)
    return config


def _repeated_names(paths: Sequence[Path]) -> list[str]:
    first: dict[str, Path] = {}
    problems = []
    for path in paths:
        if path.name in first:
            problems.append(
                f"{path}: same file name as {first[path.name]}: NeoX stores the files side by side,"
                " so each needs its own name"
            )
        first.setdefault(path.name, path)
    return problems


def _unknown(entry: Entry) -> list[str]:
    if entry.key in DERIVED:
        return [f"{entry.where}: `{entry.key}` is derived: set `{DERIVED[entry.key]}` instead"]
    if entry.key in RUNTIME:
        return [f"{entry.where}: `{entry.key}` is set by the program while it runs: leave it out"]
    if entry.key not in Config.model_fields:
        near = nearest(entry.key, Config.model_fields)
        return [f"{entry.where}: unknown key `{entry.key}`{near}"]
    return []


def _apply(overrides: Sequence[str], values: dict[str, Any], places: dict[str, str]) -> list[str]:
    problems = []
    seen: set[str] = set()
    for text in overrides:
        try:
            entry = read_override(text)
        except ConfigError as error:
            problems.append(str(error))
            continue
        for other in sorted(seen):
            if f"{other}.".startswith(f"{entry.key}.") or f"{entry.key}.".startswith(f"{other}."):
                problems.append(f"--set: `{entry.key}` is given twice, also by `{other}`")
        seen.add(entry.key)
        top, *inner = entry.key.split(".")
        problems += _unknown(Entry(normal(top), None, entry.where))
        if not inner:
            values[top] = entry.value
            for path in [path for path in places if path.startswith(f"{top}.")]:
                del places[path]
        else:
            values[top] = _replaced(values.get(top), inner, entry, problems)
        places[entry.key] = entry.where
        places.setdefault(top, entry.where)
    return problems


def _replaced(tree: Any, path: list[str], entry: Entry, problems: list[str]) -> Any:
    """A copy of the mapping `tree` in which `path` leads to the entry's value."""
    if not path:
        return entry.value
    if tree is not None and not isinstance(tree, dict):
        problems.append(f"--set {entry.key}: `{path[0]}` has no mapping to stand in")
        return tree
    tree = dict(tree or {})
    tree[path[0]] = _replaced(tree.get(path[0]), path[1:], entry, problems)
    return tree


def _settle(key: str, value: Any, places: dict[str, str], problems: list[str]) -> Any:
    """`value` with every `on` and `off` decided, and the names of a nested mapping checked."""
    known = NESTED.get(key, frozenset())
    for name in value if known and isinstance(value, dict) else ():
        if name not in known:
            where = places.get(f"{key}.{name}", places[key])
            problems.append(f"{where}: unknown key `{key}.{name}`{nearest(name, known)}")
    if isinstance(value, YesNo):
        if takes_boolean(Config, key):
            return value.truth
        problems.append(
            f'{places[key]}: `{key}: {value}` is a boolean in YAML 1.1: write "{value}"'
        )
        return str(value)
    return _booleans(value)


def _booleans(value: Any) -> Any:
    if isinstance(value, YesNo):
        return value.truth
    if isinstance(value, dict):
        return {key: _booleans(item) for key, item in value.items()}
    return [_booleans(item) for item in value] if isinstance(value, list) else value
