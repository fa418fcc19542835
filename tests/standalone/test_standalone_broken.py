"""Checkpoints that were damaged afterwards: passed over loudly, never loaded, never lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import standalone_tools as tools

from megatron_patches.config import ConfigError
from megatron_patches.standalone import checkpoint, manifest
from megatron_patches.standalone.train import train


def truncate(step: Path) -> None:
    file = step / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(step: Path) -> None:
    """In the middle of a weight: torch loads the file without a word."""
    file = step / "mp_rank_00_model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose_a_file(step: Path) -> None:
    next(step.glob("zero_*_optim_states.pt")).unlink()


def add_a_file(step: Path) -> None:
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt")


def spoil_the_manifest(step: Path) -> None:
    (step / manifest.NAME).write_text('{"files": {"../latest": {"bytes": 1, "sha256": ""}}}')


def lose_the_step(step: Path) -> None:
    shutil.rmtree(step)


def lose_latest(step: Path) -> None:
    (step.parent / "latest").unlink()
    truncate(step)


DAMAGE = {
    truncate: "mp_rank_00_model_states.pt: damaged: ",
    flip_a_bit: "its SHA-256 is not that of what was written",
    lose_a_file: "missing, though the manifest lists it",
    add_a_file: "mp_rank_01_model_states.pt: not in the manifest",
    spoil_the_manifest: "manifest.json: damaged",
    lose_the_step: "latest: names 'global_step6', which is not there",
    lose_latest: "latest: names 'no step', which is not there",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
def test_a_broken_step_is_passed_over_loudly(finished, config, tmp_path, capsys, damage):
    folder = shutil.copytree(finished, tmp_path / "run")
    damage(folder / "global_step6")
    assert train(config(**tools.THREE_STEPS)) == folder
    shown = capsys.readouterr().err
    assert "WARNING: broken checkpoint: " in shown and DAMAGE[damage] in shown
    assert "going on from global_step3 instead" in shown and "continues at iteration 3" in shown
    events = [row for row in tools.log(folder) if row.get("event")]
    assert DAMAGE[damage] in events[0]["message"] and events[0]["iteration"] == 3
    assert [row["iteration"] for row in tools.log(folder) if "lm_loss" in row] == [*range(1, 10)]
    assert tools.losses(folder) == tools.losses(finished)
    kept = {path.name for path in folder.glob("*global_step*")}
    broken = set() if damage is lose_the_step else {"broken-global_step6"}
    assert kept == {"global_step3", "global_step6", "global_step9"} | broken
    assert tools.whole_step(folder) == "global_step9"


def test_reading_a_model_is_stricter_than_resuming(finished, tmp_path):
    """An evaluation of another step than `latest` names would be a wrong number without a word."""
    folder = shutil.copytree(finished, tmp_path / "run")
    flip_a_bit(folder / "global_step6")
    with pytest.raises(checkpoint.CheckpointError, match="its SHA-256 is not"):
        checkpoint.load_model(folder)
    assert checkpoint.load_model(folder / "global_step3") is not None


def test_a_complete_run_that_lost_latest(finished, config, tmp_path, capsys):
    """Nothing is left to train, but an evaluation needs the file."""
    folder = train(config(**tools.THREE_STEPS))
    (folder / "latest").unlink()
    assert train(config(**tools.THREE_STEPS)) == folder
    shown = capsys.readouterr()
    assert "latest: names 'no step'" in shown.err and "complete at iteration 9" in shown.out
    assert tools.whole_step(folder) == "global_step9"


def test_no_whole_step(finished, config, tmp_path):
    """Never from the beginning without a word: what is there is named, and stays."""
    folder = shutil.copytree(finished, tmp_path / "run")
    truncate(folder / "global_step3")
    flip_a_bit(folder / "global_step6")
    before = sorted(folder.rglob("*"))
    with pytest.raises(checkpoint.CheckpointError, match="no step of it is whole") as caught:
        train(config(**tools.THREE_STEPS))
    assert "global_step3" in str(caught.value) and "global_step6" in str(caught.value)
    assert sorted(folder.rglob("*")) == before


def test_another_configuration_is_no_broken_step(finished, config, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(ConfigError, match="another configuration"):
        train(config(**tools.THREE_STEPS, seed=3))


def test_a_broken_step_does_not_count_among_those_kept(finished, config, tmp_path):
    """With 2 kept, the one that was gone on from must not give way to the broken ones."""
    folder = shutil.copytree(finished, tmp_path / "run")
    truncate(folder / "global_step6")
    train(config(**tools.THREE_STEPS, keep_last_n_checkpoints=2))
    assert {f.name for f in folder.glob("global_step*")} == {"global_step6", "global_step9"}
    again = shutil.copytree(finished, tmp_path / "again")
    for number in (20, 30):  # whole steps of a future that is no longer this run's
        shutil.copytree(again / "global_step6", again / f"global_step{number}")
    train(config("again", **tools.THREE_STEPS, keep_last_n_checkpoints=2))
    assert {checkpoint.step_number(f) for f in again.glob("global_step*")} == {6, 9, 20, 30}
