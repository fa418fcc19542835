"""What a run reports, and that no reporter can stop it."""

from __future__ import annotations

import json
import os
import sys

import pytest
import standalone_tools as tools

from megatron_patches.standalone import watch
from megatron_patches.standalone.train import train
from megatron_patches.training import log

BOTH = {"use_wandb": True, "tensorboard_dir": "tensorboard"}


@pytest.fixture(autouse=True)
def inside_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_log_of_a_run(config):
    folder = train(config(train_iters=5, log_interval=2, eval_iters=1, eval_interval=4))
    rows = tools.log(folder)
    assert [(row["iteration"], "lm_loss" in row) for row in rows] == [
        (2, True),
        (4, True),
        (4, False),
        (5, True),
        (5, False),
    ]
    steps = [row for row in rows if "lm_loss" in row]
    assert [row["tokens"] for row in steps] == [2 * 128, 4 * 128, 5 * 128]
    for row in steps:
        assert row["tokens_per_second"] == pytest.approx(128 * row["steps_per_second"])
        assert row["gradient_norm"] > 0
        low, mean, high = (row[f"position/bias_p_{kind}"] for kind in ("min", "mean", "max"))
        assert 0 < low <= mean <= high
    assert {"config.yml", "run.json", "log.jsonl", "latest"} <= set(os.listdir(folder))


def test_the_mean_over_the_logged_interval(config):
    every = tools.losses(train(config("every", train_iters=6, log_interval=1)))
    third = tools.losses(train(config("third", train_iters=6, log_interval=3)))
    assert third == pytest.approx([sum(every[:3]) / 3, sum(every[3:]) / 3], rel=1e-6)


def test_statistics_of_each_layer(config):
    row = tools.log(train(config(train_iters=1, position_sharing="layer")))[0]
    assert "position/layer0/bias_p_mean" in row and "position/layer1/bias_p_mean" in row


@pytest.mark.parametrize("name", ["wandb", "torch.utils.tensorboard"])
def test_a_missing_tracker(config, monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, name, None)  # its import fails
    only = {"use_wandb": True} if name == "wandb" else {"tensorboard_dir": "tensorboard"}
    folder = train(config(train_iters=2, **only))
    assert f"{name.rsplit('.')[-1]} is off: " in capsys.readouterr().err
    assert len(tools.log(folder)) == 2


def test_trackers_that_fail_while_running(config, monkeypatch, capsys):
    seen = []

    def fragile(*_):
        def track(numbers):
            seen.append(numbers["iteration"])
            if numbers["iteration"] == 2:
                raise ConnectionError("gone")

        return track

    def bad_end(*_):
        def track(numbers): ...

        def end():
            raise OSError("full")

        track.end = end
        return track

    monkeypatch.setattr(watch, "_wandb", fragile)
    monkeypatch.setattr(watch, "_tensorboard", bad_end)
    folder = train(config(train_iters=4, **BOTH))
    shown = capsys.readouterr().err
    assert "wandb failed and is off from now on: gone" in shown
    assert "a tracker failed to close: full" in shown
    assert seen == [1, 2] and len(tools.log(folder)) == 4


def test_tensorboard_gets_the_numbers(config):
    folder = train(config(train_iters=3, tensorboard_dir="tensorboard", eval_iters=1))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = config(train_iters=3)
    events = EventAccumulator(os.path.join("tensorboard", made.run_id))
    events.Reload()
    values = [scalar.value for scalar in events.Scalars("lm_loss")]
    assert values == pytest.approx(tools.losses(folder))
    assert {"learning_rate", "position/bias_p_mean", "validation_loss"} <= set(
        events.Tags()["scalars"]
    )


def test_wandb_gets_the_numbers(config, monkeypatch, tmp_path):
    """The client's interface without its service, which takes seconds and threads."""
    calls = []

    class Run:
        def log(self, numbers, step):
            calls.append((step, numbers))

        def finish(self):
            calls.append("end")

    class Module:
        @staticmethod
        def init(**options):
            calls.append(options)
            return Run()

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", Module())
    folder = train(config(train_iters=2, use_wandb=True, wandb_group="g", wandb_project="p"))
    options, *steps, end = calls
    assert end == "end" and [step for step, _ in steps] == [1, 2]
    assert [numbers["lm_loss"] for _, numbers in steps] == pytest.approx(tools.losses(folder))
    # Without a key the client would ask on the terminal and wait for ever.
    assert options["mode"] == "offline" and options["project"] == "p" and options["group"] == "g"
    assert (
        options["config"]["pos_emb"] == "kerple_log" and len(options["config"]["config_sha"]) == 12
    )


def test_a_log_cut_by_an_interruption(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"iteration": n, "lm_loss": 1.0} for n in (1, 2, 3, 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 5, "lm_')
    log.forget_after(path, 3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:3]
