"""Many inputs for one target, in child processes that may die; what is found is made small and kept."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fuzz_child import Child, Verdict
from fuzz_small import smaller
from fuzz_target import Files, Target, read_folder, write

SEEDS = Path(__file__).resolve().parent / "seeds"
NOTE = "finding.json"
SILENT = 120.0  # seconds without a verdict: the child hangs where no signal reaches it
# Inputs of one child: what a library leaks must not look like what an input asks for.
TURN = 500

Numbered = Callable[[int], Files]


@dataclass
class Tally:
    """Of one target: numbers of inputs by verdict, seconds, and one finding of each kind."""

    target: str
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    findings: dict[str, Verdict] = field(default_factory=dict)
    inputs: dict[str, Files] = field(default_factory=dict)  # of the findings
    times: Counter[str] = field(default_factory=Counter)

    @property
    def cases(self) -> int:
        return self.accepted + self.refused + sum(self.times.values())


def campaign(target: Target, seed: int, cases: int | None, seconds: float | None) -> Tally:
    """Random inputs until either limit is reached."""
    started = time.monotonic()
    deadline = started + seconds if seconds is not None else None
    tally, stop = Tally(target.name), cases if cases is not None else 1 << 60
    number = 0

    def case(at: int) -> Files:
        return target.case(seed, at)

    while number < stop and (deadline is None or time.monotonic() < deadline):
        last = min(stop, number + TURN)
        for at, verdict in judged(target, case, number, last, deadline):
            _count(tally, verdict, at, case)
            number = at + 1
    tally.seconds = time.monotonic() - started
    return tally


def replay(target: Target, inputs: dict[str, Files]) -> dict[str, Verdict]:
    """The verdicts on named inputs: kept seeds, known attacks."""
    names = sorted(inputs)
    found: dict[str, Verdict] = {}
    while len(found) < len(names):
        numbered = judged(target, lambda n: inputs[names[n]], len(found), len(names), None)
        found |= {names[number]: verdict for number, verdict in numbered}
    return found


def _count(tally: Tally, verdict: Verdict, number: int, inputs: Numbered) -> None:
    if verdict.kind == "accepted":
        tally.accepted += 1
    elif verdict.kind == "refused":
        tally.refused += 1
    else:
        tally.times[verdict.key] += 1
        if verdict.key not in tally.findings:
            tally.findings[verdict.key] = verdict
            tally.inputs[verdict.key] = inputs(number)


def judged(
    target: Target, inputs: Numbered, first: int, last: int, deadline: float | None
) -> Iterator[tuple[int, Verdict]]:
    """Verdicts of one child on inputs `first` to `last`; it ends early when the child dies."""
    target.sound()  # made here, once for all children
    with _child(target, inputs, first, last, deadline) as (pid, stream):
        at, rest = first, b""
        while True:
            if not select.select([stream], [], [], SILENT)[0]:
                os.kill(pid, signal.SIGKILL)
                yield at, Verdict("finding", "hangs", f"no verdict after {SILENT:.0f} s")
                return
            block = os.read(stream, 1 << 16)
            if not block:
                break
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                content = json.loads(line)
                if content.get("broken"):
                    raise RuntimeError(f"{target.name}: cannot be fuzzed: {content['broken']}")
                if content.get("end"):
                    return
                yield at, Verdict(**content)
                at += 1
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        yield at, Verdict("finding", f"process died ({code})", "the process died")


@contextmanager
def _child(
    target: Target, inputs: Numbered, first: int, last: int, deadline: float | None
) -> Iterator[tuple[int, int]]:
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            _work(target, scratch, writing, inputs, first, last, deadline)
        finally:
            os._exit(3)
    os.close(writing)
    try:
        yield pid, reading
    finally:
        os.close(reading)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        shutil.rmtree(scratch, ignore_errors=True)


def _work(
    target: Target,
    scratch: Path,
    writing: int,
    inputs: Numbered,
    first: int,
    last: int,
    deadline: float | None,
) -> None:
    def say(content: dict[str, Any]) -> None:
        os.write(writing, json.dumps(content).encode() + b"\n")

    try:
        child = Child(target, scratch)
    except BaseException as error:
        say({"broken": repr(error)})
        return
    for number in range(first, last):
        if deadline is not None and time.monotonic() > deadline:
            break
        try:
            verdict = child.verdict(inputs(number))
        except BaseException as error:
            verdict = Verdict("finding", f"harness {type(error).__name__}", traceback.format_exc())
        say(asdict(verdict))
    say({"end": True})


# ---- what is kept ----------------------------------------------------------------------------


def seeds(target: str) -> dict[str, Files]:
    """The kept inputs of a target by name."""
    folders = sorted(path for path in (SEEDS / target).glob("*") if path.is_dir())
    return {folder.name: read_folder(folder / "input") for folder in folders}


def keep(target: Target, key: str, files: Files) -> Path:
    """Write a finding, made small, as a seed; what it is stands beside it."""

    def same(inputs: list[Files]) -> int | None:
        """The first of `inputs` that has this finding."""
        found = judged(target, inputs.__getitem__, 0, len(inputs), None)
        return next((number for number, verdict in found if verdict.key == key), None)

    small = smaller(files, target.sound(), same)
    name = "".join(c if c.isalnum() else "-" for c in key).strip("-").lower()[:60]
    folder, number = SEEDS / target.name / name, 1
    while folder.exists():
        number += 1
        folder = SEEDS / target.name / f"{name}-{number}"
    write(small, folder / "input")
    if not small:
        (folder / "input").mkdir(parents=True)
    note = {"target": target.name, "what": key}
    (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    return folder
