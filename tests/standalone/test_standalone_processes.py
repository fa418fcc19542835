"""Real processes and real signals: killed, stopped, asked to save, through the launcher and without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import standalone_tools as tools
import yaml

from megatron_patches.standalone import evidence
from megatron_patches.standalone.signals import INTERRUPTED
from megatron_patches.standalone.train import train

LONG = 60.0  # seconds; a busy machine takes ten to start


def wait_for(what: Callable[[], object], process: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not what():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)


def steps(folder: Path) -> int:
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.is_file() else 0


@pytest.fixture
def start():
    """start(program, *arguments) -> the process; whatever is left of it ends with the test."""
    started = []

    def begin(*arguments: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tools.ROOT,
            env=tools.clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def write(path: Path, text: Path, save: Path, **changes) -> str:
    path.write_text(yaml.safe_dump(tools.settings(text, save, **changes)))
    return str(path)


def test_killed_and_asked_to_stop_a_run_ends_like_an_unbroken_one(text, tmp_path, start):
    """kill -9 while it saves at every step, SIGUSR1, and to the end; one process, bit for bit."""
    changes = {"train_iters": 120, "checkpoint_factor": 1, "keep_last_n_checkpoints": 2}
    folder = tmp_path / "run"
    file = write(tmp_path / "run.yml", text, folder, **changes)
    first = start("train.py", file)
    wait_for(lambda: steps(folder) > 20, first)
    first.kill()
    assert first.wait(LONG) == -signal.SIGKILL
    reached = int((folder / "latest").read_text().removeprefix("global_step"))

    second = start("train.py", file)
    wait_for(lambda: steps(folder) > reached + 5, second)
    second.send_signal(signal.SIGUSR1)
    _, shown = second.communicate(timeout=LONG)
    assert second.returncode == INTERRUPTED, shown
    assert f"continues at iteration {reached}" in shown and "Traceback" not in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("interrupted: ")]
    assert "SIGUSR1" in line and "the same command continues" in line
    assert not list(folder.glob("writing-*")) and len(list(folder.glob("global_step*"))) == 2

    third = start("train.py", file)
    _, shown = third.communicate(timeout=2 * LONG)
    assert third.returncode == 0, shown
    straight = train(
        tools.tiny(text, tmp_path / "straight", **{**changes, "checkpoint_factor": 120})
    )
    assert tools.losses(folder) == tools.losses(straight)
    for key in ("iteration", "learning_rate", "consumed_sha"):
        assert [r[key] for r in tools.log(folder)] == [r[key] for r in tools.log(straight)]
    tools.assert_same(tools.weights(folder), tools.weights(straight))


@pytest.fixture
def pair(text, tmp_path, start):
    """pair(**changes) -> launcher, its two workers by rank, and the folder, some steps into the run."""

    def begin(**changes):
        folder = tmp_path / "run"
        endless = {"train_iters": 10**6, "lr_decay_iters": 100, "checkpoint_factor": 5}
        keep = {"keep_last_n_checkpoints": 2, "train_micro_batch_size_per_gpu": 2}
        file = write(tmp_path / "run.yml", text, folder, **{**endless, **keep, **changes})
        process = start("deepy.py", "train.py", file, "--set", "num_gpus=2")
        wait_for(lambda: steps(folder) > 7, process)
        found = {}
        for worker in psutil.Process(process.pid).children(recursive=True):
            ranks = [w for w in worker.cmdline() if w.startswith("--local_rank=")]
            if ranks:
                found[int(ranks[0].partition("=")[2])] = worker
        assert set(found) == {0, 1}
        return process, found, folder

    return begin


def error_lines(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith("error: ")]


def test_the_launcher_hands_a_signal_on_and_its_code_back(pair):
    """To the whole group, as a scheduler does it: launcher, DeepSpeed's launcher and workers at once."""
    process, workers, folder = pair()
    os.killpg(process.pid, signal.SIGTERM)
    _, shown = process.communicate(timeout=LONG)
    assert process.returncode == INTERRUPTED, shown
    assert "interrupted: " in shown and not error_lines(shown)
    saved = int((folder / "latest").read_text().removeprefix("global_step"))
    assert saved == tools.log(folder)[-1]["iteration"]
    assert not any(worker.is_running() for worker in workers.values())


def test_a_rank_that_dies_is_named(pair):
    process, workers, folder = pair()
    workers[1].kill()
    _, shown = process.communicate(timeout=LONG)
    assert process.returncode == 1, shown
    assert any(
        f"rank 1 (process {workers[1].pid} on " in x and "is dead" in x for x in error_lines(shown)
    ), shown
    (file,) = (folder / evidence.FOLDER).iterdir()
    assert file.name.endswith("-rank0.json")
    assert "is dead" in json.loads(file.read_text())["reason"]
    assert (folder / (folder / "latest").read_text() / "manifest.json").is_file()


def test_a_rank_that_stands_still_is_named(pair):
    process, workers, folder = pair(watch_stall_seconds=2)
    workers[1].suspend()
    _, shown = process.communicate(timeout=LONG)
    assert process.returncode == 1, shown
    (line,) = error_lines(shown)
    assert "no progress for 2 s" in line and f"rank 1 (process {workers[1].pid}" in line
    assert "stopped, or its machine is gone" in line
    (file,) = (folder / evidence.FOLDER).iterdir()
    assert "stack" in json.loads(file.read_text())
