"""A training run's folder (config.yml, run.json, log.jsonl) read into a ``TrainingRow``.

The files are input that nobody vouches for: sizes are bounded, every value is checked.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_patches.analysis.jsonl import RowError
from megatron_patches.analysis.plain_yaml import read_plain
from megatron_patches.analysis.training_rows import KINDS, TrainingRow, end_slope

MAX_BYTES = 256 * 2**20  # a log of a million logged steps
PREFIX = "position/"
# Keys of the configuration that tell variants of a method apart, with the values that are no
# variant: the same as in the options of an evaluated row.
PLAIN: dict[str, Any] = {
    "position_options": {},
    "position_init": "published",
    "position_precision": "exact",
    "position_sharing": None,
    "position_weight_decay": False,
    "sliding_window_width": None,
    "variant": {},
}
NOT_RECORDED = "not recorded"


def read_run_folder(
    folder: str | os.PathLike[str],
    *,
    machine: str | None = None,
    message: str | None = None,
    curves: bool = True,
) -> TrainingRow:
    """The row of a complete run; of one that failed where ``message`` says why.

    ``machine`` stands in for runs whose run.json does not name the class of machine. RowError, with
    the file, when a file is missing or malformed, or, without ``message``, when the log does not end
    at ``train_iters``. The log of a failed run is read up to its last good line: one that diverged
    ends in losses that are not finite, one that was killed in half a line. Without ``curves`` its log
    is not read.
    """
    folder = Path(folder)
    config, run = _config(folder / "config.yml"), run_record(folder)
    log = folder / "log.jsonl"
    steps: list[dict[str, Any]] = []
    validations: list[dict[str, Any]] = []
    if message is None:
        steps, validations = _log(log)
    elif curves:
        steps, validations = _log_of_failed(log)
    total = _value(folder / "config.yml", config, "train_iters")
    last = int(steps[-1]["iteration"]) if steps else 0
    if message is None and last != total:
        raise RowError(
            f"{log}: ends at iteration {last} of {total}: the run is not complete, or log_interval "
            "left its last step out"
        )
    iterations = [int(item["iteration"]) for item in steps]
    held_out = [int(item["iteration"]) for item in validations]
    losses = [_rounded(item["lm_loss"]) for item in steps]
    slope = end_slope(iterations, losses, last) if message is None else None
    seconds, rate = _speed(log, steps)
    try:
        return TrainingRow(
            method=_value(folder / "config.yml", config, "pos_emb"),
            dataset=config.get("dataset") or "data",
            seed=config.get("seed", 1234),
            train_length=_value(folder / "config.yml", config, "seq_length"),
            data=_value(folder / "run.json", run, "data"),
            tokenizer=_value(folder / "run.json", run, "tokenizer"),
            config_sha=_value(folder / "run.json", run, "config_sha"),
            git_sha=_value(folder / "run.json", run, "git_sha"),
            engine=_value(folder / "run.json", run, "engine"),
            # A run may fail between a validation and the next logged step.
            step=last if message is None else max([last, *held_out]),
            train_iters=total,
            global_batch=_batch(folder, config, run, steps),
            parameters=_value(folder / "run.json", run, "parameters"),
            tokens=_value(log, steps[-1], "tokens") if steps else 0,
            seconds=seconds,
            tokens_per_second=rate,
            machine=run.get("machine") or machine or NOT_RECORDED,
            iterations=iterations,
            lm_loss=losses,
            learning_rate=[_rounded(_value(log, item, "learning_rate")) for item in steps],
            validation_iterations=held_out,
            validation_loss=[_rounded(item["validation_loss"]) for item in validations],
            position=_position(log, steps),
            end_slope=None if slope is None else slope[0],
            end_slope_error=None if slope is None else slope[1],
            options={k: config[k] for k, plain in PLAIN.items() if config.get(k, plain) != plain},
            status="ok" if message is None else "failed",
            message=message,
        )
    except RowError as error:
        raise RowError(f"{folder}: {error}") from error


def failed_training_row(
    folder: str | os.PathLike[str], identity: Mapping[str, Any], message: str
) -> TrainingRow | None:
    """The row of a run that failed with ``message``, whatever state its folder is in; never raises.

    ``identity`` holds what the study knows of the run (method, dataset, seed, train_length,
    config_sha). Curves that cannot be trusted are left out and the message says so. None where the
    folder does not say which model and text this was: no row can then stand for the run.
    """
    folder = Path(folder)
    row: TrainingRow | None
    try:
        row = read_run_folder(folder, message=message)
    except (RowError, OSError) as error:
        row = _without_curves(folder, f"{message} (no curves: {error})")
    if row is None or any(getattr(row, name) != value for name, value in identity.items()):
        return None  # the folder is of an earlier run of this name
    return row


def _without_curves(folder: Path, message: str) -> TrainingRow | None:
    try:
        return read_run_folder(folder, message=message, curves=False)
    except (RowError, OSError):
        return None


def _batch(
    folder: Path, config: Mapping[str, Any], run: Mapping[str, Any], steps: list[dict[str, Any]]
) -> Any:
    """Sequences a step: as recorded, else from the tokens that the log counts."""
    if run.get("global_batch") is not None or not steps:
        return _value(folder / "run.json", run, "global_batch")
    tokens = _value(folder / "log.jsonl", steps[-1], "tokens")
    length = _value(folder / "config.yml", config, "seq_length")
    try:
        return round(tokens / (steps[-1]["iteration"] * length))
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise RowError(f"{folder}: no batch follows from tokens {tokens!r}: {error}") from error


def _read(path: Path, *, errors: str = "strict") -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RowError(f"{path}: more than {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(f"{path}: cannot be read: {error}") from error


def _config(path: Path) -> dict[str, Any]:
    content = read_plain(path, _read(path))
    if not isinstance(content, dict):
        raise RowError(f"{path}: expected a mapping of keys")
    return content


def run_record(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """`run.json` of a run; RowError, with the file, when it is missing or malformed."""
    return _object(Path(folder) / "run.json")


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise RowError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RowError(f"{path}: expected an object")
    return content


def _value(path: Path, found: Mapping[str, Any], key: str) -> Any:
    if found.get(key) is None:
        raise RowError(f"{path}: {key} is missing")
    return found[key]


def _log(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The logged steps and the validations, each with a finite loss."""
    steps: list[dict[str, Any]] = []
    validations: list[dict[str, Any]] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        item = _logged(f"{path}:{number}", line)
        _sort_in(item, steps, validations)
    return steps, validations


def _log_of_failed(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """As ``_log``, up to the first line that cannot be read or holds a number that is not finite."""
    steps: list[dict[str, Any]] = []
    validations: list[dict[str, Any]] = []
    if not path.exists():
        return steps, validations  # it failed before its first step
    for number, line in enumerate(_read(path, errors="replace").splitlines(), 1):
        try:
            item = _logged(f"{path}:{number}", line)
        except RowError:
            break
        if any(isinstance(value, float) and not math.isfinite(value) for value in item.values()):
            break
        _sort_in(item, steps, validations)
    return steps, validations


def _logged(where: str, line: str) -> dict[str, Any]:
    """One line of a log, checked."""
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where}: not JSON: {error}") from error
    if not isinstance(item, dict) or not isinstance(item.get("iteration"), int):
        raise RowError(f"{where}: expected an object with an iteration")
    for name in ("lm_loss", "validation_loss"):
        if item.get(name) is not None and not _is_finite(item[name]):
            raise RowError(f"{where}: {name}: not finite: {item[name]!r}")
    return item


def _sort_in(
    item: dict[str, Any], steps: list[dict[str, Any]], validations: list[dict[str, Any]]
) -> None:
    for name, into in (("lm_loss", steps), ("validation_loss", validations)):
        # GPT-NeoX's first line of a resumed run may have no loss yet.
        if item.get(name) is not None:
            into.append(item)


def _is_finite(value: Any) -> bool:
    """Whether this is a number that fits a finite float (JSON's integers may have any size)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= sys.maxsize


def _rounded(value: Any) -> Any:
    """Six significant digits; anything but a number is left for the row to refuse."""
    return float(f"{value:.6g}") if _is_finite(value) else value


def _speed(path: Path, steps: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Seconds of all steps, and the median of tokens per second; None where it is not logged."""
    if not steps or any(item.get("tokens_per_second") is None for item in steps):
        return None, None
    rates, seconds, before = [], 0.0, 0
    for item in steps:
        rate, tokens = item["tokens_per_second"], _value(path, item, "tokens")
        if not _is_finite(rate) or rate <= 0 or not _is_finite(tokens) or tokens <= before:
            raise RowError(
                f"{path}: iteration {item['iteration']}: bad tokens_per_second or tokens"
            )
        seconds += (tokens - before) / rate
        before = tokens
        rates.append(float(rate))
    return _rounded(seconds), _rounded(statistics.median(rates))


def _position(path: Path, steps: list[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """The position parameters' statistics by name: ``position/<name>_mean`` and so on in the log."""
    if not steps:
        return {}
    names = dict.fromkeys(
        key.removeprefix(PREFIX).rpartition("_")[0] for key in steps[0] if key.startswith(PREFIX)
    )
    return {
        name: {
            kind: [_rounded(_value(path, item, f"{PREFIX}{name}_{kind}")) for item in steps]
            for kind in KINDS
        }
        for name in names
    }
