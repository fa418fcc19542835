"""From rows to groups over seeds: what tables and figures have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_patches.analysis.jsonl import UsageError, dump
from megatron_patches.analysis.rows import (
    WHOLE_WINDOW,
    Row,
    RowError,
    check_comparable,
    latest_rows,
)
from megatron_patches.analysis.validate import SEEDED_WINDOWS

VARIANT = "variant"  # the option that names the levels of a study's factors
WINDOW = "sliding_window_width"  # the option of a model that attends to that many tokens only
EPS = "attention_eps"  # the share of the weight that far keys may be left out for
READ_WITH = "eval_position_options"  # options of the position method that only the evaluation had


@dataclass
class Group:
    """The rows of one method at one length: by seed, a perplexity or a reason for having none.

    ``remarks`` are what rows with a perplexity say of it.
    """

    perplexities: dict[int, float] = field(default_factory=dict)
    problems: dict[int, tuple[str, str]] = field(default_factory=dict)  # status, message
    remarks: dict[int, str] = field(default_factory=dict)


Series = dict[str, dict[int, Group]]  # label -> evaluation length in tokens -> group


class Labelled(Protocol):
    """A row of any kind that belongs to a method, or to a variant of it."""

    @property
    def method(self) -> str: ...

    @property
    def options(self) -> dict[str, Any]: ...


def series_label(row: Labelled, *, window: bool = True) -> str:
    """The method, with its options, those of the evaluation alone, and its attention window.

    ``alibi``, ``alibi (position_init=alibi)``, ``rotary, scaling yarn, factor 8``, ``alibi, window 512``;
    without ``window`` the label of the same method with the whole text in view. A study's levels stand
    for the position options that they set: ``kerple_log, decay none, sharing layered``.
    """
    found = row.options.get(VARIANT)
    levels = found if isinstance(found, dict) else {}
    shown = [
        f"{name}={value if isinstance(value, str) else dump(value)}"
        for name, value in sorted(row.options.items())
        if name not in (WINDOW, READ_WITH)
        and not (levels and name.startswith(("position_", VARIANT)))
    ]
    label = ", ".join([row.method, *(f"{factor} {level}" for factor, level in levels.items())])
    label += f" ({', '.join(shown)})" if shown else ""
    label += read_with(row.options.get(READ_WITH))
    return f"{label}, window {row.options[WINDOW]}" if window and WINDOW in row.options else label


def read_with(options: Any) -> str:
    """Options of an evaluation as the end of a label: ``, scaling yarn, factor 8``; texts come first."""
    items = options.items() if isinstance(options, Mapping) else ()
    ordered = sorted(items, key=lambda item: (not isinstance(item[1], str), item[0]))
    return "".join(f", {k} {v if isinstance(v, str) else dump(v)}" for k, v in ordered)


def comparable_rows(rows: Iterable[Row]) -> list[Row]:
    """The latest row of each cell, checked: RowError when there are none or they do not compare."""
    kept = latest_rows(rows)
    if not kept:
        raise RowError("no rows: nothing to show")
    check_comparable(kept)
    return kept


def only(rows: Iterable[Row], methods: Sequence[str] | None) -> list[Row]:
    """The rows of ``methods`` (all if None); UsageError when one of them has no row."""
    rows = list(rows)
    if methods is None:
        return rows
    present = {row.method for row in rows}
    absent = [method for method in methods if method not in present]
    if absent:
        raise UsageError(f"no rows of {', '.join(absent)}; there are {', '.join(sorted(present))}")
    return [row for method in dict.fromkeys(methods) for row in rows if row.method == method]


def collect(rows: Iterable[Row], methods: Sequence[str] | None = None) -> Series:
    """Group comparable rows by label and length, sorted by label, or as listed in ``methods``.

    RowError when rows may not meet (see ``check_comparable``), when two rows of different
    configurations claim the same label, seed and length, or when a listed method has no rows.
    """
    kept = comparable_rows(only(rows, methods))
    origin: dict[tuple[str, int, int], str] = {}
    series: Series = {}
    for row in kept:
        label = series_label(row)
        before = origin.setdefault((label, row.seed, row.eval_length), row.config_sha)
        if before != row.config_sha:
            raise RowError(
                f"{label}, seed {row.seed}, length {row.eval_length}: results of two "
                f"configurations ({before} and {row.config_sha}); choose one with config_sha"
            )
        group = series.setdefault(label, {}).setdefault(row.eval_length, Group())
        if row.perplexity is not None:
            group.perplexities[row.seed] = row.perplexity
            group.remarks |= {row.seed: row.message} if row.message else {}
        else:
            group.problems[row.seed] = (row.status, row.message or "")
    labels = series if methods is not None else sorted(series)
    return {label: series[label] for label in labels}


def provenance(rows: Iterable[Row]) -> list[str]:
    """Lines that say what was measured and how, for the head of a table or the foot of a figure."""
    rows = comparable_rows(rows)
    first = rows[0]
    parts = [f"dataset {first.dataset}", f"protocol {first.protocol}", f"split {first.split}"]
    if first.last_k is not None:
        parts.append(f"last {first.last_k} tokens of a window scored")
    tiled = first.protocol in WHOLE_WINDOW
    parts.append("stride = window" if tiled else f"stride {first.stride}")
    if first.protocol in SEEDED_WINDOWS:
        parts[-1] = "windows drawn by the seed"
    parts.append(f"{_by_length(rows, 'tokens')} tokens in {_by_length(rows, 'windows')} windows")
    if first.documents_isolated:
        parts.append("documents isolated")
    sizes = sorted({row.parameters for row in rows})
    size = f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "")
    return [
        ", ".join(parts),
        f"{size} parameters, trained on {first.train_length} tokens for {first.step} steps, "
        f"seeds {listed(rows, 'seed')}",
        f"engine {listed(rows, 'engine')}, attention {listed(rows, 'attention')}, {first.dtype}",
        # From here on what only identifies: `--brief` of the tables leaves it out.
        f"data {shorten(first.data)}, tokenizer {shorten(first.tokenizer)}",
        f"commit {listed(rows, 'git_sha')}",
    ]


def configurations(rows: Iterable[Row]) -> str:
    """One line with the hashes of the configurations behind each label."""
    hashes: dict[str, dict[str, None]] = {}
    for row in sorted(comparable_rows(rows), key=lambda row: (series_label(row), row.seed)):
        hashes.setdefault(series_label(row), {})[shorten(row.config_sha)] = None
    return "configs " + "; ".join(f"{label} {' '.join(found)}" for label, found in hashes.items())


def shorten(text: str) -> str:
    """Text with every long hexadecimal number cut to 12 digits; a suffix like -dirty stays."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]+\b", r"\1", text)


def _by_length(rows: list[Row], name: str) -> str:
    """One number where it is the same at every length, else the numbers in order of length."""
    values = {row.eval_length: getattr(row, name) for row in rows if row.status == "ok"}
    ordered = [f"{values[length]:,}" for length in sorted(values)]
    return ordered[0] if len(set(ordered)) == 1 else " / ".join(ordered) or "no"


def listed(rows: Iterable[Any], name: str) -> str:
    """The values of one field of rows of any kind, each once, sorted; hashes cut."""
    return " ".join(shorten(str(value)) for value in sorted({getattr(row, name) for row in rows}))
