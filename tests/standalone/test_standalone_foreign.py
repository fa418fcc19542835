"""Before GPT-NeoX trains: what it would not check itself, and what is written about its run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from megatron_patches.config import Batch, ConfigError, dump
from megatron_patches.standalone.checkpoint import check_start
from megatron_patches.standalone.foreign import begin_neox_run, starting_step
from megatron_patches.standalone.safety import check_untrusted, step_that_neox_loads
from megatron_patches.standalone.train import train
from megatron_patches.standalone.weights import CheckpointError

COMMIT = "a" * 40
BATCH = Batch(2, 1, 2)
ROOT = Path(__file__).resolve().parents[2]


def begin(config, batch, processes):
    begin_neox_run(config, batch, processes, COMMIT, starting_step(config))


class Harmful:
    def __reduce__(self):
        return print, ("executed",)


def step(folder: Path, name: str = "mp_rank_00_model_states.pt", content: object = None) -> Path:
    """A run folder with one step and `latest`."""
    (folder / "global_step1").mkdir(parents=True)
    torch.save({"module": {}} if content is None else content, folder / "global_step1" / name)
    (folder / "latest").write_text("global_step1")
    return folder


def test_run_json(config, tmp_path):
    made = config()
    begin(made, BATCH, 2)
    run = json.loads((made.save_dir / "run.json").read_text())
    assert run["engine"] == "neox" and run["neox_commit"] == COMMIT
    assert (run["global_batch"], run["processes"]) == (2, 2)
    assert len(run["data"]) == 16


def test_a_folder_of_the_other_engine_is_refused(config):
    made = config(train_iters=1)
    train(made)
    with pytest.raises(ConfigError, match=r"run of the engine standalone.*convert\.py"):
        begin(made, BATCH, 1)


def test_a_converted_run_continues_in_its_folder_on_its_text(config):
    made = config(train_iters=1)
    folder = train(made)
    record = folder / "run.json"
    told = json.loads(record.read_text())
    record.write_text(json.dumps({**told, "converted_to": "neox", "data": "0" * 16}))
    batch = Batch(told["global_batch"], 1, told["global_batch"])
    with pytest.raises(ConfigError, match="has data 0000"):
        begin(made, batch, 1)
    record.write_text(json.dumps({**told, "converted_to": "neox"}))
    begin(made, batch, 1)
    assert json.loads(record.read_text())["engine"] == "neox"


def test_a_run_continues_with_the_same_batch_only(config):
    made = config()
    begin(made, BATCH, 1)
    step(made.save_dir)
    begin(made, BATCH, 1)
    with pytest.raises(ConfigError, match="global batch"):
        begin(made, Batch(4, 1, 4), 1)


def test_code_in_a_checkpoint_is_found_without_running_it(config, tmp_path, capsys):
    source = step(tmp_path / "source", content={"module": {}, "extra": Harmful()})
    with pytest.raises(CheckpointError, match=r"would run code \(builtins\.print\)"):
        check_untrusted(source / "global_step1")
    with pytest.raises(CheckpointError, match="would run code"):
        begin(config(load=str(source), finetune=True), BATCH, 1)
    assert "executed" not in capsys.readouterr().out


def test_a_file_that_is_no_torch_archive_is_refused(tmp_path):
    folder = step(tmp_path / "source")
    (folder / "global_step1" / "other.pt").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(CheckpointError, match=r"other\.pt"):
        check_untrusted(folder / "global_step1")


@pytest.mark.parametrize(
    "name", sorted(p.name for p in (ROOT / "tests/goldens/neox/checkpoints").iterdir())
)
def test_the_checkpoints_of_neox_are_plain(name):
    check_untrusted(step_that_neox_loads(ROOT / "tests/goldens/neox/checkpoints" / name))


def test_the_step_that_neox_loads_is_the_one_that_is_looked_through(config, tmp_path):
    """A clean step that `latest` names, or clean files beside it, do not hide another one."""
    source = step(tmp_path / "source")
    bad = source / "global_step5"
    bad.mkdir()
    torch.save({"extra": Harmful()}, bad / "mp_rank_00_model_states.pt")
    made = config(load=str(source), iteration=5)
    with pytest.raises(CheckpointError, match="global_step5.*would run code"):
        begin(made, BATCH, 1)
    (source / "latest").write_text("global_step5")
    torch.save({"module": {}}, source / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="would run code"):
        begin(config(load=str(source)), BATCH, 1)
    (source / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match=r"names '../elsewhere', no global_step<N>"):
        begin(config(load=str(source)), BATCH, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("pos_emb", "kerple_power"), ("num_attention_heads", 2), ("num_layers", 3)],
)
def test_weights_of_another_model_are_refused_by_their_configuration(config, key, value):
    trained = config(pos_emb="kerple_log")
    step(trained.save_dir)
    (trained.save_dir / "config.yml").write_text(dump(trained))
    now = config(name="next", pos_emb="kerple_log", load=str(trained.save_dir), finetune=True)
    check_start(trained.save_dir, now)
    # what a start from weights may change
    check_start(trained.save_dir, now.model_copy(update={"seed": 7, "weight_decay": 0.5}))
    other = now.model_copy(update={key: value})
    with pytest.raises(ConfigError, match=rf"weights of another model: `{key}`"):
        check_start(trained.save_dir, other)
    with pytest.raises(ConfigError, match="weights of another model"):
        begin(other, BATCH, 1)


def test_weights_without_a_configuration_are_left_to_their_shapes(config, tmp_path):
    check_start(step(tmp_path / "bare"), config())
