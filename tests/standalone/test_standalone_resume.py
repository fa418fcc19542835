"""A run that was interrupted ends like one that was not."""

from __future__ import annotations

import json

import pytest
import standalone_tools as tools
import torch

from megatron_patches.config import ConfigError
from megatron_patches.standalone import checkpoint, provenance, saving
from megatron_patches.standalone.train import Trainer, TrainingError, train


class Killed(Exception):
    pass


def killed_after(monkeypatch, step: int) -> None:
    """The next run dies after update number `step`, as if the machine had gone."""
    original = Trainer._one_step

    def one_step(self, *arguments):
        if self.step == step:
            raise Killed
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, "_one_step", one_step)


@pytest.mark.parametrize(("accumulation", "zero"), [(a, z) for a in (1, 4) for z in (0, 1, 2, 3)])
def test_a_resumed_run_equals_an_uninterrupted_one(config, monkeypatch, accumulation, zero):
    """Kill at step 9, after the checkpoint of step 6: steps 7 to 9 are done, and logged, twice."""
    changes = {
        "train_iters": 12,
        "gradient_accumulation_steps": accumulation,
        "checkpoint_factor": 6,
        "zero_optimization": {"stage": zero},
    }
    straight = train(config("straight", **changes))
    with monkeypatch.context() as patch:
        killed_after(patch, 9)
        with pytest.raises(Killed):
            train(config("resumed", **changes))
    resumed = train(config("resumed", **changes))

    assert tools.losses(resumed) == tools.losses(straight)
    for key in ("iteration", "learning_rate", "gradient_norm", "consumed_sha"):
        found = [row[key] for row in tools.log(resumed)]
        assert found == [row[key] for row in tools.log(straight)], key
    assert [row["iteration"] for row in tools.log(resumed)] == list(range(1, 13))
    tools.assert_same(tools.weights(resumed), tools.weights(straight))
    model = checkpoint.load_model(resumed)
    assert torch.isfinite(model(torch.arange(32)[None])).all()


def test_a_complete_run_is_left_alone(config, capsys):
    folder = train(config())
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train(config()) == folder
    assert "complete at iteration 6, nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("change", [{"seed": 7}, {"hidden_size": 32}, {"pos_emb": "alibi"}])
def test_another_configuration_in_the_same_folder_is_refused(config, change):
    folder = train(config(train_iters=2))
    stored = (folder / "config.yml").read_bytes()
    ((key, value),) = change.items()
    told = rf"holds a run of another configuration .*: `{key}` .* is {value!r}, was .*; choose"
    with pytest.raises(ConfigError, match=told):
        train(config(train_iters=2, **change))
    assert (folder / "config.yml").read_bytes() == stored


def test_bfloat16_resumes_exactly(config, monkeypatch):
    changes = {"precision": "bfloat16", "zero_optimization": {"stage": 1}, "checkpoint_factor": 3}
    straight = train(config("straight", **changes))
    with monkeypatch.context() as patch:
        killed_after(patch, 4)
        with pytest.raises(Killed):
            train(config("resumed", **changes))
    resumed = train(config("resumed", **changes))
    assert tools.losses(resumed) == tools.losses(straight)
    tools.assert_same(tools.weights(resumed), tools.weights(straight))


def test_changed_data_are_refused(tmp_path):
    tools.write_text(tmp_path / "text")
    train(tools.tiny(tmp_path / "text", tmp_path / "run", train_iters=2))
    for file in (tmp_path / "text").iterdir():
        file.unlink()
    tools.write_text(tmp_path / "text", seed=1)
    with pytest.raises(ConfigError, match="this run has data .* now it is .* restore the files"):
        train(tools.tiny(tmp_path / "text", tmp_path / "run", train_iters=2))


def test_an_interrupted_save_leaves_the_previous_checkpoint(config, monkeypatch):
    changes = {"train_iters": 8, "checkpoint_factor": 4}
    straight = train(config("straight", **changes))

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        killed_after(patch, 5)
        with pytest.raises(Killed):
            train(config("torn", **changes))
    with monkeypatch.context() as patch:
        # The files of step 8 are written, the rename to their final name never happens.
        patch.setattr(saving.shutil, "rmtree", die)
        patch.setattr(saving.Path, "rename", die)
        with pytest.raises(Killed):
            train(config("torn", **changes))
    torn = config("torn", **changes).save_dir
    assert (torn / "writing-global_step8").is_dir() and not (torn / "global_step8").exists()
    assert (torn / "latest").read_text() == "global_step4"
    assert checkpoint.load_model(torn) is not None
    train(config("torn", **changes))
    assert not list(torn.glob("writing-*")) and (torn / "latest").read_text() == "global_step8"
    tools.assert_same(tools.weights(torn), tools.weights(straight))


def test_old_checkpoints_are_removed(config):
    folder = train(config(checkpoint_factor=1, keep_last_n_checkpoints=2, train_iters=5))
    assert sorted(path.name for path in folder.glob("global_step*")) == [
        "global_step4",
        "global_step5",
    ]
    folder = train(config("all", checkpoint_factor=2, extra_save_iters=[1], train_iters=5))
    steps = sorted(checkpoint.step_number(path) for path in folder.glob("global_step*"))
    assert steps == [1, 2, 4, 5]


def test_the_step_numbers_are_sorted_as_numbers(config):
    folder = train(config(checkpoint_factor=1, keep_last_n_checkpoints=1, train_iters=11))
    assert [path.name for path in folder.glob("global_step*")] == ["global_step11"]


def test_saves_on_a_logarithmic_scale(config):
    folder = train(config(checkpoint_factor=2, checkpoint_scale="log", train_iters=9))
    steps = sorted(checkpoint.step_number(path) for path in folder.glob("global_step*"))
    assert steps == [1, 2, 4, 8, 9]


@pytest.mark.parametrize(
    ("key", "zero", "problem"),
    [("global_batch", 0, "global batch 99"), ("processes", 1, "processes 99")],
)
def test_another_number_of_processes(config, key, zero, problem):
    """A larger global batch would read other samples under the same numbers."""
    made = config(train_iters=2, zero_optimization={"stage": zero})
    folder = train(made)
    (folder / "run.json").write_text(json.dumps({**provenance.read_run(folder), key: 99}))
    with pytest.raises(ConfigError, match=problem):
        train(made)


def test_two_runs_do_not_share_a_folder(config):
    made = config()
    with (
        provenance.locked(made.save_dir),
        pytest.raises(ConfigError, match="another process is training in it"),
    ):
        train(made)


def test_finetuning_needs_weights(config):
    with pytest.raises(ConfigError, match="`finetune` .* needs `load`"):
        train(config(finetune=True))


def test_weights_that_are_not_finite_are_not_saved(config, monkeypatch):
    """The loss of a step is checked before its update; the save checks what the update left."""
    original = Trainer._one_step

    def one_step(self, *arguments):
        loss = original(self, *arguments)
        if self.step + 1 == 4:
            self.model.get_parameter("sequential.5.norm.bias").data[0] = float("nan")
        return loss

    monkeypatch.setattr(Trainer, "_one_step", one_step)
    made = config(train_iters=8, checkpoint_factor=2)
    with pytest.raises(TrainingError, match=r"sequential\.5\.norm\.bias holds NaN"):
        train(made)
    assert (made.save_dir / "latest").read_text() == "global_step2"
