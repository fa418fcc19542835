"""What must hold whatever happened, checked with this file's own reading of a run's folder.

Nothing here asks the engine whether its files are whole: sizes, hashes, rows and sample numbers are
read and computed anew.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Of a row of log.jsonl: how fast it went, the only numbers that a restart may change.
SPEED = ("tokens_per_second", "steps_per_second")

Row = dict[str, Any]


class Broken(Exception):
    """A promise of docs/reliability.md that did not hold; the text says which and what was found."""


def require(held: bool, what: str) -> None:
    """Raises Broken with `what` unless `held`."""
    if not held:
        raise Broken(what)


# ---- checkpoints -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """What a run's folder offers to continue from.

    Attributes:
        step: the newest whole step in the order of docs/reliability.md; 0 where there is none.
        broken: name -> why, for `latest` and the steps that come before it in that order.
        begun: whether any step or `latest` is there at all.
    """

    step: int
    broken: dict[str, str] = field(default_factory=dict)
    begun: bool = False


def steps_of(run: Path) -> list[Path]:
    """The step folders of `run`, by number."""
    found = [f for f in run.glob("global_step*") if re.fullmatch(r"global_step\d+", f.name)]
    return sorted(found, key=number_of)


def number_of(step: Path) -> int:
    return int(step.name.removeprefix("global_step"))


def standing(run: Path) -> Standing:
    """Read `run` as the rules say: the step that `latest` names, then the others, newest first."""
    latest, steps = run / "latest", steps_of(run)
    text = latest.read_bytes()[:80].decode(errors="replace").strip() if latest.is_file() else ""
    named = [step for step in steps if step.name == text]
    broken = {} if named or not steps else {"latest": f"names {text!r}"}
    for step in named + [step for step in reversed(steps) if step not in named]:
        why = fault(step)
        if not why:
            return Standing(number_of(step), broken, True)
        broken[step.name] = why
    return Standing(0, broken, bool(steps) or latest.is_file())


def fault(step: Path) -> str:
    """Why the files of a step are not those of its manifest; empty: they are."""
    try:
        files = json.loads((step / "manifest.json").read_text(encoding="utf-8"))["files"]
        surplus = {file.name for file in step.iterdir()} - set(files) - {"manifest.json"}
        if surplus:
            return f"{min(surplus)}: not in the manifest"
        for name, entry in files.items():
            content = (step / name).read_bytes()
            if len(content) != entry["bytes"]:
                return f"{name}: {len(content)} bytes, the manifest says {entry['bytes']}"
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                return f"{name}: another SHA-256 than the manifest's"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name}: missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json: {type(error).__name__}"
    return ""


def check_intact(run: Path, at_least: int) -> Standing:
    """After a fault that does not touch files: `latest` names a whole step, not older than before."""
    now = standing(run)
    require(not now.broken, f"checkpoints broken by the fault: {now.broken}")
    require(now.step >= at_least, f"step {at_least} was there before, now the newest is {now.step}")
    if now.step:
        named = (run / "latest").read_text(encoding="utf-8")
        require(named == f"global_step{now.step}", f"`latest` names {named!r}, not {now.step}")
    return now


# ---- the log ---------------------------------------------------------------------------------


def rows(log: Path) -> list[Row]:
    """The measured rows of a log.jsonl, without what tells the speed; a torn last line is left out.

    Raises Broken for a line that is no JSON elsewhere.
    """
    if not log.is_file():
        return []
    found = []
    lines = log.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            require(number == len(lines), f"log.jsonl: line {number} of {len(lines)} is torn")
            break
        if "event" not in row:
            found.append({key: value for key, value in row.items() if key not in SPEED})
    return found


def check_log(log: Path, unbroken: list[Row], reached: int) -> int:
    """The rows are the first of the unbroken run's, bit for bit, and go to step `reached` or beyond.

    Returns the last step in the log.
    """
    found = rows(log)
    require(len(found) <= len(unbroken), f"log.jsonl has {len(found)} rows, of {len(unbroken)}")
    for mine, theirs in zip(found, unbroken, strict=False):
        if mine != theirs:
            keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
            told = [f"{key} {mine.get(key)!r}, unbroken {theirs.get(key)!r}" for key in keys]
            raise Broken(f"log.jsonl, iteration {mine.get('iteration')}: {'; '.join(told)}")
    last = int(found[-1]["iteration"]) if found else 0
    require(last >= reached, f"log.jsonl ends at iteration {last}, the checkpoint is of {reached}")
    return last


def check_order(unbroken: list[Row], batch: int) -> None:
    """`consumed_sha` is the chain over samples 0, 1, 2, ..., `batch` of them a step."""
    chain, sample = "", 0
    for row in unbroken:
        if "consumed_sha" not in row:
            continue
        while sample < row["iteration"] * batch:
            chain = hashlib.sha256(f"{chain} {sample}".encode()).hexdigest()[:16]
            sample += 1
        found = row["consumed_sha"]
        require(
            found == chain, f"iteration {row['iteration']}: consumed_sha {found}, it is {chain}"
        )


# ---- weights ---------------------------------------------------------------------------------


def check_same_state(run: Path, unbroken: Path, step: int) -> int:
    """Weights, optimizer and counters of both runs at `step` are equal bit for bit.

    Returns how many numbers were compared.
    """
    tag = f"global_step{step}"
    names = [sorted(f.name for f in (folder / tag).glob("*.pt")) for folder in (run, unbroken)]
    require(names[0] == names[1] != [], f"{tag}: files {names[0]}, unbroken {names[1]}")
    return sum(_compare(run / tag / name, unbroken / tag / name) for name in names[0])


def _compare(mine: Path, theirs: Path) -> int:
    import torch

    from megatron_patches.standalone.resuming import deepspeed_globals
    from megatron_patches.standalone.weights import safe_load

    also, compared = deepspeed_globals(), 0
    ours, other = (dict(_leaves(safe_load(path, also))) for path in (mine, theirs))
    require(ours.keys() == other.keys(), f"{mine.name}: other entries than the unbroken run's")
    for key, value in ours.items():
        require(_equal(value, other[key]), f"{mine.name}: {key} differs from the unbroken run's")
        compared += value.numel() if isinstance(value, torch.Tensor) else 1
    return compared


def _leaves(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}/{number}")
    else:
        # DeepSpeed's records of its own (a loss scaler, a range of a slice) hold plain values.
        inner = getattr(value, "__dict__", None)
        if inner and type(value).__module__.startswith("deepspeed."):
            yield from _leaves(inner, path)
        else:
            yield path, value


def _equal(mine: Any, theirs: Any) -> bool:
    import torch

    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = mine.dtype == theirs.dtype and mine.shape == theirs.shape
        # As bits: two NaN would differ as numbers, and 0.0 would equal -0.0.
        return same and _bits(mine) == _bits(theirs)
    return type(mine) is type(theirs) and bool(mine == theirs)


def _bits(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
