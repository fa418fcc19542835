"""A stand-in for wandb's client that notes what it gets and misbehaves when asked; a reader of real files."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_patches.config import Config, dump
from megatron_patches.standalone.watch import Watch

# CALLS and MISCHIEF come from the environment: the module is imported in the tracker's own process.
STAND_IN = """
import json, os, subprocess, sys, time

MISCHIEF = os.environ.get("MISCHIEF", "")
if MISCHIEF == "absent":
    raise ImportError("No module named 'wandb'")


def note(**call):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\\n")


def Settings(**options):
    return options


class Run:
    url, id, dir = "https://example.org/run", "id", "/nowhere/run-1/files"
    step = int(os.environ.get("STEP", "0"))
    resumed = step > 0

    def log(self, numbers, step):
        if MISCHIEF == "log raises" and step == 2:
            raise ConnectionError("the line\\nis cut")
        if MISCHIEF == "log hangs":
            time.sleep(3600)
        if MISCHIEF == "dies" and step == 2:
            os.abort()
        if MISCHIEF == "is killed" and step == 2:
            os.kill(os.getpid(), 9)
        if MISCHIEF == "leaves a process":  # which holds the pipe to the training
            subprocess.Popen(["sleep", "20"], start_new_session=True)
            os.abort()
        if MISCHIEF == "chatter":
            os.write(1, b"no newline \\xff {")
            print(["not", "an", "answer"], 17, file=sys.stderr)
        note(step=step, numbers=numbers)

    def finish(self):
        if MISCHIEF == "finish hangs":
            time.sleep(3600)
        if MISCHIEF == "finish raises":
            raise OSError("no space left")
        note(end=True)


def init(**options):
    if MISCHIEF == "init raises":
        raise RuntimeError("no such entity")
    if MISCHIEF == "init hangs":
        time.sleep(3600)
    note(init=options)
    return Run()
"""


def stand_in(folder: Path, monkeypatch: Any, mischief: str = "") -> Path:
    """Put the stand-in where the tracker's process finds it; the file of what it gets."""
    (folder / "wandb.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("CALLS", str(folder / "calls.jsonl"))
    monkeypatch.setenv("MISCHIEF", mischief)
    return folder / "calls.jsonl"


def calls(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def offline_records(file: Path) -> list[Any]:
    """The records of a .wandb file, which is a log of LevelDB's format with a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block = file.read_bytes(), 1 << 15
    assert data[:4] == b":W&B"
    found, at, parts = [], 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # no room for another header in this block
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(parts))
            parts = b""
    return found


def row(iteration: int, **more: Any) -> dict[str, Any]:
    speed = {"tokens_per_second": 10.0, "steps_per_second": 1.0}
    return {"iteration": iteration, "lm_loss": 1 / iteration, **speed, "consumed_sha": "a", **more}


def session(config: Config, after: int, rows: Iterable[dict[str, Any]]) -> float:
    """One session of a run that logs these rows; returns the longest time that a row took, seconds."""
    folder = config.save_dir
    folder.mkdir(exist_ok=True)
    (folder / "config.yml").write_text(dump(config))
    watch, longest = Watch(config, folder, after), 0.0
    for one in rows:
        begun = time.perf_counter()
        watch.step(one, show="lm_loss" in one)
        longest = max(longest, time.perf_counter() - begun)
    watch.close()
    return longest


def steps(file: Path) -> list[int]:
    """The steps that the stand-in was told, in their order."""
    return [call["step"] for call in calls(file) if "step" in call]
