"""TensorBoard and wandb get what the log has, once, and nothing that they do can stop or slow a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import standalone_tools as tools
import tracker_tools
from tracker_tools import calls

from megatron_patches.config import ConfigError, config_sha, dump
from megatron_patches.standalone import tracker_clients, trackers, tracking
from megatron_patches.standalone.train import train
from megatron_patches.standalone.watch import Watch

pytest.importorskip("wandb", reason="the extra `train` is not installed")


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """A folder of its own, and nothing of this machine's account with wandb."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "netrc").write_text("")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def client(tmp_path, monkeypatch):
    """client(mischief) -> the file of what a stand-in for wandb gets."""
    (tmp_path / "client").mkdir()
    return lambda mischief="": tracker_tools.stand_in(tmp_path / "client", monkeypatch, mischief)


def row(iteration, **more):
    speed = {"tokens_per_second": 10.0, "steps_per_second": 1.0}
    return {"iteration": iteration, "lm_loss": 1 / iteration, **speed, "consumed_sha": "a", **more}


def session(config, after, rows):
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


def steps(file):
    return [call["step"] for call in calls(file) if "step" in call]


def test_which_trackers_are_asked_for(config):
    def found(**changes):
        return tracker_clients.names(config(**changes))

    assert found() == []
    assert found(tensorboard_dir="t", use_wandb=True) == ["tensorboard", "wandb"]
    tables = {"wandb": {"enabled": True}, "tensorboard": {"enabled": True, "output_path": "t"}}
    assert found(**tables) == ["tensorboard", "wandb"]
    assert found(wandb={"enabled": True}, use_wandb=False) == []
    assert found(tensorboard={"enabled": False, "output_path": "t"}) == []


def scalars(place, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place))
    events.Reload()
    return [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]


def test_tensorboard_gets_what_a_training_logs(config):
    made = config(train_iters=3, tensorboard_dir="boards", eval_iters=1, eval_interval=2)
    folder = train(made)
    place = os.path.join("boards", made.run_id)
    found = scalars(place, "lm_loss")
    assert [step for step, _ in found] == [1, 2, 3]
    assert [value for _, value in found] == pytest.approx(tools.losses(folder))
    logged = [r["validation_loss"] for r in tools.log(folder) if "validation_loss" in r]
    assert [value for _, value in scalars(place, "validation_loss")] == pytest.approx(logged)
    assert len(logged) == 2 and len(scalars(place, "position/bias_p_mean")) == 3


def test_tensorboard_of_a_resumed_run_has_each_step_once(config):
    made = config(tensorboard_dir="boards")
    session(made, 0, [row(n, lm_loss=1.0) for n in range(1, 6)])
    rows = [row(n, lm_loss=2.0) for n in range(4, 9)]
    session(made, 3, [*rows[:3], {"iteration": 6, "validation_loss": 7.0}, *rows[3:]])
    place = os.path.join("boards", made.run_id)
    assert scalars(place, "lm_loss") == [(n, 1.0 if n < 4 else 2.0) for n in range(1, 9)]
    assert scalars(place, "validation_loss") == [(6, 7.0)]


def test_how_a_wandb_run_is_filed(config, client):
    file = client()
    made = config(use_wandb=True, wandb_group="study", wandb_project="p", wandb_team="lab", seed=77)
    session(made, 0, [row(1), {"iteration": 1, "validation_loss": 3.0}, row(2)])
    first, *logged, end = calls(file)
    options = first["init"]
    expected = {"group": "study", "project": "p", "entity": "lab", "name": made.run_id}
    expected |= {"job_type": "kerple_log", "tags": ["kerple_log", "toy", "seed 77"]}
    assert expected.items() <= options.items()
    stored = options["config"]
    assert (stored["method"], stored["dataset"], stored["seed"]) == ("kerple_log", "toy", 77)
    assert stored["config_sha"] == config_sha(made) and stored["num_layers"] == 2
    assert options["mode"] == "offline" and options["resume"] is None
    assert [call["step"] for call in logged] == [1, 1, 2] and end == {"end": True}
    assert logged[0]["numbers"] == {
        "iteration": 1.0,
        "lm_loss": 1.0,
        "tokens_per_second": 10.0,
        "steps_per_second": 1.0,
    }
    assert logged[1]["numbers"] == {"iteration": 1.0, "validation_loss": 3.0}


def test_deepspeeds_table_names_project_group_and_team(config):
    table = {"enabled": True, "project": "p", "group": "g", "team": "t"}
    made = config(wandb=table)
    found = tracker_clients.describe(made, made.save_dir)
    assert (found["project"], found["group"], found["entity"]) == ("p", "g", "t")
    found = tracker_clients.describe(config(wandb=table, wandb_project="q"), made.save_dir)
    assert found["project"] == "q"


def test_a_resumed_run_is_the_same_wandb_run_and_its_steps_rise(config, client):
    file = client()
    made = config(use_wandb=True)
    session(made, 0, [row(n) for n in range(1, 6)])
    session(made, 3, [row(n) for n in range(4, 9)])
    ids = {call["init"]["id"] for call in calls(file) if "init" in call}
    assert len(ids) == 1
    assert steps(file) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("way", ["variable", "netrc"])
def test_online(config, client, monkeypatch, tmp_path, way):
    file = client()
    if way == "variable":
        monkeypatch.setenv("WANDB_API_KEY", "k")
    else:
        (tmp_path / "netrc").write_text("machine wandb.example.org login user password k\n")
    monkeypatch.setenv("STEP", "3")  # what the service says that it has, next step first
    made = config(use_wandb=True, wandb_host="https://wandb.example.org")
    session(made, 0, [row(n) for n in range(1, 6)])
    options = calls(file)[0]["init"]
    assert options["mode"] == "online" and options["resume"] == "allow"
    assert steps(file) == [3, 4, 5]


def test_the_real_client_offline(config, capsys):
    made = config(train_iters=3, use_wandb=True, wandb_group="study", eval_iters=1)
    folder = train(made)
    assert "WARNING" not in capsys.readouterr().err
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    records = tracker_tools.offline_records(file)
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    number = json.loads((folder / ".trackers" / "wandb-run.json").read_text())["id"]
    assert (run.run_id, run.run_group, run.job_type) == (number, "study", "kerple_log")
    assert set(run.tags) == {"kerple_log", "toy", f"seed {made.seed}"}
    stored = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert stored["config_sha"] == config_sha(made) and stored["pos_emb"] == "kerple_log"
    history = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            history.setdefault(record.history.step.num, {}).update(values)
    logged = {}
    for one in tools.log(folder):
        numbers = {k: v for k, v in one.items() if isinstance(v, int | float)}
        logged.setdefault(one["iteration"], {}).update(numbers)
    assert sorted(history) == sorted(logged) == [1, 2, 3]
    for step, numbers in logged.items():
        for key, value in numbers.items():
            assert history[step][key] == pytest.approx(value, rel=1e-12), (step, key)


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


COMMANDS = {
    "deepy.py": ["--help"],
    "train.py": ["--help"],
    "eval.py": ["--help"],
    "generate.py": ["--help"],
    "scripts/tables.py": ["--help"],
    "scripts/sweep.py": ["configs/sweeps/table3.yml", "--dry-run", "--tokens-per-second", "1e6"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_computes_nothing_loads_nothing_heavy(command):
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0] or '.'\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert end.code in (0, None), end.code\n"
        "heavy = {'torch', 'deepspeed', 'matplotlib', 'scipy', 'wandb', 'tensorboard'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", code, command, *COMMANDS[command]]
    done = subprocess.run(arguments, cwd=tools.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
