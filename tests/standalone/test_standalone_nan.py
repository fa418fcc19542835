"""A number that is not finite stops the run where it arises, by name."""

from __future__ import annotations

import os
import signal

import pytest
import standalone_tools as tools
import yaml

from megatron_patches.standalone import arguments, cli, runtime
from megatron_patches.standalone.train import Trainer, TrainingError, train


@pytest.fixture
def poison(monkeypatch):
    """poison(step, change): `change(model)` after update number `step`."""

    def install(step, change):
        original = Trainer._one_step

        def one_step(self, *arguments):
            loss = original(self, *arguments)
            if self.step + 1 == step:
                change(self.model)
            return loss

        monkeypatch.setattr(Trainer, "_one_step", one_step)

    return install


def fill(name: str, value: float):
    def change(model):
        model.get_parameter(name).data.view(-1)[0] = value

    return change


KEY = "sequential.3.mlp.linear1.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_poisoned_parameter_is_named(config, poison, value):
    poison(3, fill(KEY, value))
    with pytest.raises(TrainingError, match=rf"iteration 4 on rank 0: parameter {KEY} holds"):
        train(config())
    assert [row["iteration"] for row in tools.log(config().save_dir)] == [1, 2, 3]
    assert not list(config().save_dir.glob("global_step*"))


def test_the_command_ends_with_1_and_one_line(text, tmp_path, poison, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "finish", lambda: None)  # the other tests need the group
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(tools.settings(text, tmp_path / "run", optimizer=None)))
    poison(2, fill(KEY, float("nan")))
    assert cli.train_main([str(file)]) == 1
    shown = capsys.readouterr().err
    (line,) = [line for line in shown.splitlines() if line.startswith("error")]
    assert "iteration 3" in line and KEY in line and "Traceback" not in shown


def test_a_launcher_that_ends_the_rank_comes_too_late(text, tmp_path, poison, monkeypatch, capsys):
    """Its SIGTERM, from the failure until the message stands; leaving the group comes after that."""
    shown = []
    said = arguments._say

    def signalled(*values):
        os.kill(os.getpid(), signal.SIGTERM)
        return said(*values)

    monkeypatch.setattr(arguments, "_say", signalled)
    monkeypatch.setattr(runtime, "finish", lambda: shown.append(capsys.readouterr().err))
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(tools.settings(text, tmp_path / "run", optimizer=None)))
    poison(2, fill(KEY, float("nan")))
    before = signal.signal(signal.SIGTERM, lambda *_: shown.append("nobody caught SIGTERM"))
    try:
        assert cli.train_main([str(file)]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    (only,) = shown
    assert "error: loss is not finite at iteration 3" in only


def test_an_infinite_loss_names_the_output(config, poison):
    """Every parameter is finite, the loss is not: the first module whose output is not is named."""
    poison(2, lambda model: model.get_parameter("sequential.5.norm.weight").data.fill_(3e38))
    with pytest.raises(
        TrainingError, match=r"iteration 3 .*first in the output of sequential\.[56]"
    ):
        train(config())


def test_validation_is_watched_too(config, poison):
    poison(6, fill(KEY, float("nan")))
    with pytest.raises(TrainingError, match=rf"parameter {KEY}"):
        train(config(eval_iters=1, eval_interval=6))
    assert not list(config().save_dir.glob("global_step*"))
