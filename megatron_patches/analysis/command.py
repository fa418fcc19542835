"""What the command lines over results share: choosing rows, and errors in one readable line."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_patches.analysis.failures import FILE, Failure, open_failures, read_failures
from megatron_patches.analysis.jsonl import UsageError, plain
from megatron_patches.analysis.rows import KernelRow, Row, RowError

_LISTS = {"window_losses", "position_losses", "options"}
FIELDS = tuple(field.name for field in dataclasses.fields(Row) if field.name not in _LISTS)
_OF_RUN = {"method", "dataset", "seed", "train_length", "config_sha"}


def existing_file(text: str) -> Path:
    """argparse type: the path of a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return path


def condition(text: str) -> tuple[str, str]:
    """argparse type: ``FIELD=VALUE`` with a field of a row."""
    name, equals, value = text.partition("=")
    if not equals or name not in FIELDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not FIELD=VALUE with one of the fields {', '.join(FIELDS)}"
        )
    return name, value


def add_common_arguments(
    parser: argparse.ArgumentParser, *, files: str = "+", without: str = ""
) -> None:
    """The arguments that choose rows, and ``--debug``; ``files`` is the nargs of the result files,
    ``without`` what the help says of leaving them out."""
    parser.add_argument(
        "rows",
        nargs=files,
        type=existing_file,
        metavar="ROWS",
        help=f"result files (JSON lines){without}",
    )
    parser.add_argument("--dataset", help="this data set only (else each in turn)")
    parser.add_argument("--methods", nargs="+", help="these methods only, in this order")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        type=condition,
        metavar="FIELD=VALUE",
        help="rows with this value only, as in --where protocol=last; may be repeated",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_file_arguments(parser: argparse.ArgumentParser, *, without: str = "") -> None:
    """``--kernels`` and ``--training``; ``without`` is what the help says of leaving them out."""
    for name, what in (("kernels", "learned kernels"), ("training", "training rows")):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            type=existing_file,
            default=[],
            metavar="FILE",
            help=f"files of {what} (JSON lines){without}",
        )


def lets_through(row: Any, arguments: argparse.Namespace) -> bool:
    """Whether a row of any kind fits --dataset, --methods and those of --where that it has.

    Of a failed step, only the conditions on its run count: its `step` is a title and its `message` that
    of a command, so those on rows say nothing about it.
    """
    if arguments.dataset is not None and row.dataset != arguments.dataset:
        return False
    if row.method not in (arguments.methods or [row.method]):
        return False
    return all(
        str(getattr(row, own)) == value
        for name, value in arguments.where
        for own in [_own_field(row, name)]
        if own is not None and hasattr(row, own)
    )


def _own_field(row: Any, name: str) -> str | None:
    """What the field ``name`` of an evaluated row is called in a row of any kind, None where it has none."""
    if isinstance(row, Failure):
        return name if name in _OF_RUN else None
    if isinstance(row, KernelRow) and name == "parameters":
        return "model_parameters"  # its `parameters` are those of the kernel
    return name


def failed_beside(
    paths: Iterable[Path], rows: Iterable[Any], arguments: argparse.Namespace
) -> list[Failure]:
    """Steps in failed.jsonl beside result files that fit the choice and have no result among ``rows``."""
    beside = dict.fromkeys(path.with_name(FILE) for path in paths)
    there = read_failures(path for path in beside if path.is_file())
    return [item for item in open_failures(there, rows) if lets_through(item, arguments)]


def by_dataset(rows: Iterable[Row], arguments: argparse.Namespace) -> dict[str, list[Row]]:
    """The chosen rows by data set, sorted; UsageError when the choice leaves none."""
    conditions = list(arguments.where)
    if arguments.dataset is not None:
        conditions.append(("dataset", arguments.dataset))
    chosen: dict[str, list[Row]] = {}
    for row in rows:
        if all(str(getattr(row, name)) == value for name, value in conditions):
            chosen.setdefault(row.dataset, []).append(row)
    if not chosen:
        shown = ", ".join(f"{name}={value}" for name, value in conditions) or "(no condition)"
        raise UsageError(f"no rows match {shown}")
    return {dataset: chosen[dataset] for dataset in sorted(chosen)}


def guarded(work: Callable[[], None], *, debug: bool) -> int:
    """Exit code of ``work``: 0, or after one line about what went wrong 1, 2 where it was the options."""
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (such as head) left; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RowError, OSError) as error:
        if debug:
            traceback.print_exc()
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def write_text(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
