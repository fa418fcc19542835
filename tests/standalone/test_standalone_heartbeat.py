"""Ranks that stand still or are gone: named by the others, which do not wait for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from megatron_patches.standalone import evidence, heartbeat
from megatron_patches.standalone.heartbeat import Heartbeat
from megatron_patches.standalone.train import train


@pytest.fixture
def left():
    """left: what a heartbeat calls instead of ending the process."""
    codes, event = [], threading.Event()

    def leave(code):
        codes.append(code)
        event.set()

    leave.codes, leave.event = codes, event
    return leave


def test_a_rank_without_progress(tmp_path, left, capsys):
    kept = []

    def keep(iteration, content):
        kept.append((iteration, content))
        return "evidence in X"

    with Heartbeat(tmp_path, 0, 1, 0.3, keep, left) as heart:
        heart.beat(7, "reading data")
        assert left.event.wait(20)
    assert left.codes == [1]
    shown = capsys.readouterr().err
    assert "no progress for 0.3 s (`watch_stall_seconds`) on rank 0, reading data of it" in shown
    assert "of iteration 7" in shown and "evidence in X" in shown
    ((iteration, content),) = kept
    assert iteration == 7 and any("left.event.wait" in line for line in content["stack"])


def test_progress_of_any_kind_is_enough(tmp_path, left):
    with Heartbeat(tmp_path, 0, 1, 0.6, lambda *_: "", left) as heart:
        for micro in range(12):
            heart.beat(1, "validation", micro)
            time.sleep(0.1)
    assert not left.codes


def test_switched_off(tmp_path, left):
    with Heartbeat(tmp_path, 0, 1, 0, lambda *_: "", left) as heart:
        assert not heart._thread.is_alive()
    assert not left.codes and not (tmp_path / ".ranks").exists()


def test_time_asleep_does_not_count(tmp_path, left, monkeypatch):
    """A laptop that slept an hour wakes up and goes on."""
    now = [0.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    with Heartbeat(tmp_path, 0, 1, 0.4, lambda *_: "", left) as heart:
        heart.beat(1, "forward pass")
        now[0] += 3600.0
        time.sleep(0.3)
        assert not left.codes


def others(heart: Heartbeat, **states) -> None:
    """The files of other ranks, as they would write them."""
    heart._place.mkdir(exist_ok=True)
    for name, state in states.items():
        file = heart._file(int(name[1:]))
        heartbeat.write_text(file, json.dumps({**heart._own(), **state}))


def test_the_rank_that_is_behind_is_blamed(tmp_path):
    """Two wait in the gradients' sum; one still reads; a fourth is in an earlier micro batch."""
    heart = Heartbeat(tmp_path, 0, 3, 0.1, lambda *_: "")
    heart.beat(5, "backward pass", 1)
    turns = iter(range(1000))

    def go_on():
        others(
            heart,
            r0={"turns": next(turns)},
            r1={"phase": heartbeat.PHASES.index("reading data"), "turns": next(turns)},
            r2={"turns": next(turns)},
        )

    go_on()
    end = threading.Event()

    def alive():
        while not end.wait(0.01):
            go_on()

    thread = threading.Thread(target=alive)
    thread.start()
    try:
        blamed = heart.behind()
    finally:
        end.set()
        thread.join()
    assert list(blamed) == [1] and heart.gone() != []  # standing still now, all of them
    (line,) = heartbeat._named(blamed)
    assert (
        line.startswith("rank 1 (process ") and "is behind, last seen reading data of iter" in line
    )


def test_a_dead_process_and_a_stopped_one(tmp_path):
    heart = Heartbeat(tmp_path, 0, 3, 0.1, lambda *_: "")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    others(heart, r0={}, r1={"process": child, "iteration": 4}, r2={})
    assert list(heart.behind()) == [1]  # a zombie, not yet waited for
    os.waitpid(child, 0)
    (line,) = heart.gone()
    assert line.startswith(f"rank 1 (process {child} on ") and "is dead, last seen" in line
    others(heart, r1={"host": "another", "process": child}, r2={"host": "another"})
    heart._write()
    assert [line.split(" (")[0] for line in heart.gone()] == ["rank 1", "rank 2"]
    assert all("stopped, or its machine is gone" in line for line in heart.gone())


def test_a_rank_that_never_wrote_is_not_called_stopped(tmp_path):
    """As on a full disk, where no heartbeat can be written."""
    heart = Heartbeat(tmp_path, 0, 2, 0.05, lambda *_: "")
    (line,) = heart.gone()
    assert line.startswith("rank 1 (process ? on ?) is without a sign of life, last seen starting")


@pytest.mark.parametrize(
    "damage",
    [
        *("[1]", '{"iteration": 3', "3", "", "[" * 9000, '{"turns": 1}'),
        *({"phase": 99}, {"phase": "saving"}, {"process": "x"}, {"process": 2**80}, {"turns": -1}),
        *({"iteration": None}, {"micro": True}, {"iteration": "9" * 20_000}),
    ],
)
def test_a_damaged_sign_of_life_is_none(tmp_path, damage):
    """What it raised in the thread would have ended the watch, and nobody would have known."""
    heart = Heartbeat(tmp_path, 0, 2, 0.05, lambda *_: "")
    others(heart, r1={} if isinstance(damage, str) else damage)
    if isinstance(damage, str):
        heart._file(1).write_text(damage)
    (line,) = heart.gone()
    assert line.startswith("rank 1 (process ? on ?) is without a sign of life")


def test_a_sign_of_life_does_not_drive_the_terminal(tmp_path):
    heart = Heartbeat(tmp_path, 0, 2, 0.05, lambda *_: "")
    others(heart, r1={"host": "\x1b[2Jnode"})
    (line,) = heart.gone()
    assert "on \\x1b[2Jnode) is stopped" in line


def test_a_process_that_is_gone_only_when_asked_again(tmp_path, monkeypatch):
    """The kernel closes what a killed process held before the process counts as dead."""
    heart = Heartbeat(tmp_path, 0, 2, 0.1, lambda *_: "")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    others(heart, r0={}, r1={"process": child.pid})

    def later(seconds):
        child.kill()
        child.wait()

    monkeypatch.setattr(heartbeat.time, "sleep", later)
    (line,) = heart.gone()
    assert line.startswith(f"rank 1 (process {child.pid} on ") and "is dead, last seen" in line


def test_a_run_leaves_no_heartbeat_behind(config):
    folder = train(config())
    assert not (folder / ".ranks").exists() and not (folder / evidence.FOLDER).exists()
