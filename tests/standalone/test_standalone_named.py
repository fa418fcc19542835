"""Which folder a configuration means: the weights that it starts from, or the run that it describes."""

from __future__ import annotations

import shutil

import pytest
import standalone_tools as tools

from megatron_patches.config import ConfigError, dump
from megatron_patches.standalone import checkpoint, cli, load_model, saving
from megatron_patches.standalone.train import train


@pytest.fixture
def tuned(trained, tmp_path, config):
    """A run that was trained on from the weights of another, and its configuration."""
    source = tmp_path / "source"
    shutil.copytree(trained, source)
    made = config("tuned", load=str(source), finetune=True, train_iters=4, checkpoint_factor=2)
    train(made)
    return made


def test_the_weights_before_are_not_scored_as_the_run(tuned, tmp_path, capsys):
    file, own = tmp_path / "tuned.yml", tuned.save_dir
    file.write_text(dump(tuned))
    asked = [str(file), "--lengths", "32", "--max-tokens", "65", "--output"]
    assert cli.eval_main([*asked, str(tmp_path / "rows.jsonl")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'source'} is named" in said and f"own folder {own}" in said
    assert cli.generate_main([str(file), "--prompt", "x"]) == 2
    assert checkpoint.named_run(own, tuned) == own
    itself = tuned.model_copy(update={"load": str(own)})
    assert checkpoint.named_run(None, itself) == own
    step = itself.model_copy(update={"iteration": 2})
    assert checkpoint.named_run(None, step) == own / "global_step2"


def test_a_step_of_the_loaded_run(trained, config):
    """Nothing was trained yet: `load` is read, at its `iteration`."""
    made = config("new", load=str(trained))
    assert checkpoint.named_run(None, made) == trained
    assert checkpoint.named_run(None, config("new")) == made.save_dir
    step = checkpoint.named_run(None, config("new", load=str(trained), iteration=12))
    assert step == trained / "global_step12"


def test_a_run_goes_on_though_its_first_weights_are_gone(tuned, tmp_path):
    straight = load_model(tuned.save_dir).state_dict()
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(tuned.save_dir / "global_step4")
    saving.point_latest(tuned.save_dir, "global_step2")
    train(tuned)
    tools.assert_same(load_model(tuned.save_dir).state_dict(), straight)


@pytest.mark.parametrize("damage", ["pos_emb: [", "pos_emb: kerple_loh", "hidden_size: many"])
def test_a_configuration_that_cannot_be_read_is_not_passed_over(trained, tmp_path, config, damage):
    """Weights of a log kernel fit a power kernel: without the file nobody would notice."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    key = damage.partition(":")[0]
    lines = (run / "config.yml").read_text().splitlines()
    changed = [damage if line.startswith(f"{key}:") else line for line in lines]
    assert changed != lines
    (run / "config.yml").write_text("\n".join(changed))
    other = config("other", pos_emb="kerple_power")
    for read in (
        lambda: load_model(run, config=other),
        lambda: load_model(run / "global_step12", config=other),
        lambda: checkpoint.check_start(run, other),
    ):
        with pytest.raises(ConfigError, match=r"config\.yml: cannot be compared .* restore it"):
            read()
    (run / "config.yml").unlink()
    assert load_model(run, config=other).position_method.name == "kerple_power"  # as was asked
