"""Nothing that TensorBoard or wandb do can stop or slow a run, or lose a row."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import standalone_tools as tools
from tracker_tools import calls, row, session, steps

from megatron_patches.config import ConfigError, dump
from megatron_patches.standalone import trackers, tracking
from megatron_patches.standalone.train import train
from megatron_patches.standalone.watch import Watch

pytest.importorskip("wandb", reason="the extra `train` is not installed")
pytestmark = pytest.mark.usefixtures("no_account")


MISCHIEF = {
    "absent": ("No module named 'wandb'", 0),
    "init raises": ("no such entity", 0),
    "init hangs": ("did not finish", 0),
    "log raises": ("the line is cut", None),  # how many went before is a matter of time
    "log hangs": ("did not finish", 0),
    "dies": ("its process ended with code -6", None),
    "is killed": ("its process ended with code -9", None),
    "leaves a process": ("did not finish", 0),
    "finish raises": ("no space left", 5),
    "finish hangs": ("did not finish", 5),
}


@pytest.mark.parametrize("mischief", MISCHIEF)
def test_what_a_tracker_does_wrong_neither_stops_nor_slows(
    config, client, monkeypatch, capsys, mischief
):
    client(mischief)
    monkeypatch.setattr(trackers.Follower.close, "__defaults__", (4.0,))
    longest = session(config(use_wandb=True), 0, [row(n) for n in range(1, 6)])
    # A row is a write to a file; a busy machine may take the processor away for a moment.
    assert longest < 0.5
    assert [r["iteration"] for r in tools.log(config().save_dir)] == [1, 2, 3, 4, 5]
    lines = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(lines) == 1, lines
    reason, done = MISCHIEF[mischief]
    assert reason in lines[0] and "log.jsonl has all" in lines[0]
    if done is not None:
        assert f"It has iteration {done} of 5;" in lines[0]


def test_a_training_with_a_hanging_tracker_ends_like_any_other(config, client, monkeypatch):
    client("log hangs")
    monkeypatch.setattr(trackers.Follower.close, "__defaults__", (1.0,))
    plain = train(config("plain", train_iters=4))
    hanging = train(config("hanging", train_iters=4, use_wandb=True))
    assert tools.losses(hanging) == tools.losses(plain)
    tools.assert_same(tools.weights(hanging), tools.weights(plain))


def test_output_of_the_package_is_not_taken_for_an_answer(config, client, capsys):
    file = client("chatter")
    session(config(use_wandb=True), 0, [row(n) for n in range(1, 4)])
    assert steps(file) == [1, 2, 3]
    assert "WARNING" not in capsys.readouterr().err


def test_what_was_missed_comes_later(config, client, monkeypatch, capsys):
    """In the next session, or by the command that the warning names."""
    file = client("init raises")
    made = config(use_wandb=True)
    session(made, 0, [row(n) for n in range(1, 4)])
    client()
    session(made, 3, [row(4)])
    assert steps(file) == [1, 2, 3, 4]
    client("log raises")
    monkeypatch.setenv("MISCHIEF", "init raises")
    session(made, 4, [row(5), row(6)])
    assert "It has iteration 0 of 6" in capsys.readouterr().err
    client()
    arguments = [sys.executable, "-m", "megatron_patches.standalone.tracking", "wandb"]
    env = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{tools.ROOT}"}
    for expected in ("2 rows sent to wandb", "0 rows sent to wandb"):
        done = subprocess.run(
            [*arguments, str(made.save_dir)], env=env, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "") and expected in done.stdout
    assert steps(file) == [1, 2, 3, 4, 5, 6]


def test_the_command_is_refused_while_the_run_trains(config, client):
    made = config(use_wandb=True)
    session(made, 0, [row(1)])
    with (
        tracking.locked(made.save_dir),
        pytest.raises(ConfigError, match="another process is training"),
    ):
        tracking.send("wandb", made.save_dir)


def test_a_killed_training_leaves_a_tracker_that_finishes(config, client, tmp_path):
    file = client()
    made = config(use_wandb=True)
    made.save_dir.mkdir()
    (made.save_dir / "config.yml").write_text(dump(made))
    code = (
        "import os, sys; from pathlib import Path\n"
        "from megatron_patches.config import load_run_config\n"
        "from megatron_patches.standalone.watch import Watch\n"
        "folder = Path(sys.argv[1]); watch = Watch(load_run_config(folder), folder, 0)\n"
        "for n in range(1, 6): watch.step({'iteration': n, 'validation_loss': 1.0}, show=False)\n"
        "os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{tools.ROOT}"}
    done = subprocess.run([sys.executable, "-c", code, str(made.save_dir)], env=env)
    assert done.returncode == -signal.SIGKILL
    for _ in range(200):
        if calls(file) and calls(file)[-1] == {"end": True}:
            break
        time.sleep(0.1)
    assert steps(file) == [1, 2, 3, 4, 5] and calls(file)[-1] == {"end": True}


def test_a_failing_training_does_not_wait(config, client, monkeypatch):
    """Its message must come before a launcher ends the process."""
    client("finish hangs")
    made = config(use_wandb=True)
    made.save_dir.mkdir()
    (made.save_dir / "config.yml").write_text(dump(made))
    watch = Watch(made, made.save_dir, 0)
    (tracker,) = watch._trackers
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="went wrong"):
        try:
            raise RuntimeError("went wrong")
        finally:
            watch.close()
    assert time.monotonic() - begun < 1.0
    tracker.close(0.1)  # the test's own: nothing is left behind


@pytest.mark.parametrize("name", ["wandb.json", "wandb-run.json"])
@pytest.mark.parametrize(
    "content", ["", "[1]", '{"iteration": -1, "rows": 0, "id": "../x"}', "[" * 100_000]
)
def test_accounts_are_read_as_untrusted(config, client, capsys, name, content):
    file = client()
    made = config(use_wandb=True)
    (made.save_dir / ".trackers").mkdir(parents=True)
    (made.save_dir / ".trackers" / name).write_text(content)
    session(made, 0, [row(1)])
    shown = capsys.readouterr().err
    assert f"{name}: " in shown and "remove it to" in shown
    assert steps(file) == [] and len(tools.log(made.save_dir)) == 1


def test_a_tensorboard_folder_that_cannot_be_made(config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    session(config(tensorboard_dir=str(tmp_path / "file")), 0, [row(1), row(2)])
    shown = capsys.readouterr().err
    assert shown.count("WARNING: tensorboard: ") == 1 and "iteration 0 of 2" in shown
    assert len(tools.log(config().save_dir)) == 2


def test_a_full_disk_under_tensorboard(config, tmp_path, capsys):
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        many = {f"position/{n}": float(n) for n in range(100)}
        session(config(tensorboard_dir=str(place)), 0, [row(n, **many) for n in range(1, 30)])
    finally:
        subprocess.run(["umount", str(place)], capture_output=True)
    shown = capsys.readouterr().err
    assert shown.count("WARNING: tensorboard: ") == 1 and "No space left" in shown
    assert len(tools.log(config().save_dir)) == 29


def test_a_slow_tracker_is_told_once(config, client, monkeypatch, capsys):
    client("log hangs")
    monkeypatch.setattr(trackers, "LATE", 0.05)
    monkeypatch.setattr(trackers.Follower.close, "__defaults__", (0.5,))
    made = config(use_wandb=True)
    session(made, 0, [])
    watch = Watch(made, made.save_dir, 0)
    for n in range(1, 5):
        watch.step(row(n))
        time.sleep(0.04)
    shown = capsys.readouterr().err
    assert shown.count("WARNING: wandb: no answer for") == 1
    watch.close()
    assert "WARNING" not in capsys.readouterr().err


def test_a_process_that_cannot_be_started(config, monkeypatch, capsys):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(trackers.subprocess, "Popen", refuse)
    session(config(use_wandb=True), 0, [row(1)])
    assert "WARNING: wandb is off, its process cannot be started" in capsys.readouterr().err
    assert len(tools.log(config().save_dir)) == 1
