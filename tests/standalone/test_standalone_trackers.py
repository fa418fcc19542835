"""TensorBoard and wandb get what the log has, once."""

from __future__ import annotations

import json
import os

import pytest
import standalone_tools as tools
import tracker_tools
from tracker_tools import calls, row, session, steps

from megatron_patches.config import config_sha
from megatron_patches.standalone import tracker_clients
from megatron_patches.standalone.train import train

pytest.importorskip("wandb", reason="the extra `train` is not installed")
pytestmark = pytest.mark.usefixtures("no_account")


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
