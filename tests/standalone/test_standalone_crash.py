"""A checkpoint is whole or not there: killed at every step on the disk, damaged afterwards, disk full."""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import standalone_tools as tools
import torch

from megatron_patches.config import ConfigError
from megatron_patches.standalone import checkpoint, manifest, runtime, saving, watch
from megatron_patches.standalone.train import Trainer, train


class Killed(BaseException):
    """No handler for ordinary errors sees it, as none sees SIGKILL."""


class Disk:
    """Counts what a process does to the disk, and kills it before number `fatal`; then all fails.

    A file that torch writes counts three times: before, with half of it there, and after.
    """

    WRITES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fatal: int | None = None) -> None:
        self.fatal, self.done = fatal, 0
        for name in self.WRITES:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        original_open, original_save = builtins.open, torch.save

        def opened(file, mode="r", *arguments, **options):
            if set(mode) & set("wax+"):
                self.count()
            return original_open(file, mode, *arguments, **options)

        def saved(content, path, **options):
            self.count()
            original_save(content, path, **options)
            whole = Path(path).read_bytes()
            with original_open(path, "wb") as stream:
                stream.write(whole[: len(whole) // 2])
            self.count()
            with original_open(path, "wb") as stream:
                stream.write(whole)
            self.count()

        monkeypatch.setattr(builtins, "open", opened)
        monkeypatch.setattr(torch, "save", saved)

    def _counted(self, function):
        def counted(*arguments, **options):
            self.count()
            return function(*arguments, **options)

        return counted

    def count(self) -> None:
        self.done += 1
        if self.fatal is not None and self.done > self.fatal:
            raise Killed


def stopped_before(step: int, monkeypatch: pytest.MonkeyPatch, config) -> Trainer:
    """A trainer whose run has done `step` steps and not yet saved the last of them."""
    trainer = Trainer(config, runtime.start(config))
    original = Trainer.save

    def save(self):
        if self.step == step:
            raise Killed
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", save)
        with pytest.raises(Killed):
            trainer.run()
    return trainer


def whole_step(folder: Path) -> str:
    """The step that `latest` names, after its files were compared with its manifest."""
    named = (folder / "latest").read_text()
    records = manifest.read(folder / named)
    assert records is not None
    present = {file.name for file in (folder / named).iterdir()} - {manifest.NAME}
    assert set(records) == present
    assert not manifest.faults(folder / named, records, records)
    return named


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_killed_at_every_step_on_the_disk(config, monkeypatch, tmp_path, zero):
    """`latest` always names a whole step, old or new, and the run goes on from there, exactly."""
    changes = {
        "train_iters": 12,
        "checkpoint_factor": 4,
        "keep_last_n_checkpoints": 1,
        "zero_optimization": {"stage": zero},
    }
    straight = train(config("straight", **changes))
    trainer = stopped_before(8, monkeypatch, config("base", **changes))
    base, named = trainer.folder, []

    def dies_at(fatal: int | None) -> int:
        trainer.folder = shutil.copytree(base, tmp_path / f"torn{fatal}")
        with monkeypatch.context() as patch:
            disk = Disk(patch, fatal)
            try:
                trainer.save()
            except Killed:
                assert fatal is not None
        return disk.done

    steps_on_disk = dies_at(None)
    assert whole_step(trainer.folder) == "global_step8" and steps_on_disk >= 20
    assert [f.name for f in trainer.folder.glob("*global*")] == ["global_step8"]
    for fatal in range(steps_on_disk):
        dies_at(fatal)
        named.append(whole_step(trainer.folder))
        # Wherever it died, starting again ends as if it had not; a few of them, for time.
        if fatal % 13 == zero or named[-2:] == ["global_step4", "global_step8"]:
            resumed = train(config(f"torn{fatal}", **changes))
            tools.assert_same(tools.weights(resumed), tools.weights(straight))
            assert tools.losses(resumed) == tools.losses(straight)
            assert [f.name for f in resumed.glob("*global*")] == ["global_step12"]
    assert named == sorted(named) and set(named) == {"global_step4", "global_step8"}


def test_killed_in_the_first_save(config, monkeypatch, tmp_path):
    """Before `latest` exists a run starts anew, or goes on from the step that is there."""
    changes = {"train_iters": 6, "checkpoint_factor": 3}
    straight = train(config("straight", **changes))
    trainer = stopped_before(3, monkeypatch, config("base", **changes))
    base, fatal = trainer.folder, 0
    while True:
        trainer.folder = shutil.copytree(base, tmp_path / f"torn{fatal}")
        with monkeypatch.context() as patch:
            disk = Disk(patch, fatal)
            with suppress(Killed):
                trainer.save()
        begun = checkpoint.begun(trainer.folder)
        assert begun == (trainer.folder / "global_step3").is_dir()
        if fatal % 5 == 0 or (begun and not (trainer.folder / "latest").is_file()):
            resumed = train(config(f"torn{fatal}", **changes))
            tools.assert_same(tools.weights(resumed), tools.weights(straight))
            assert tools.losses(resumed) == tools.losses(straight)
        if disk.done <= fatal:
            break
        fatal += 1
    assert fatal > 10


# ---- damaged afterwards ----------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> Path:
    """A run with the steps 3 and 6 of 9, of ZeRO stage 1; the last step was never reached."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tools.tiny(text, folder, **RUN))
    shutil.rmtree(folder / "global_step9")
    saving.point_latest(folder, "global_step6")
    return folder


RUN = {"train_iters": 9, "checkpoint_factor": 3, "zero_optimization": {"stage": 1}}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
def test_a_broken_step_is_passed_over_loudly(finished, config, tmp_path, capsys, damage):
    folder = shutil.copytree(finished, tmp_path / "run")
    damage(folder / "global_step6")
    assert train(config(**RUN)) == folder
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
    assert whole_step(folder) == "global_step9"


def test_reading_a_model_is_stricter_than_resuming(finished, tmp_path):
    """An evaluation of another step than `latest` names would be a wrong number without a word."""
    folder = shutil.copytree(finished, tmp_path / "run")
    flip_a_bit(folder / "global_step6")
    with pytest.raises(checkpoint.CheckpointError, match="its SHA-256 is not"):
        checkpoint.load_model(folder)
    assert checkpoint.load_model(folder / "global_step3") is not None


def test_a_complete_run_that_lost_latest(finished, config, tmp_path, capsys):
    """Nothing is left to train, but an evaluation needs the file."""
    folder = train(config(**RUN))
    (folder / "latest").unlink()
    assert train(config(**RUN)) == folder
    shown = capsys.readouterr()
    assert "latest: names 'no step'" in shown.err and "complete at iteration 9" in shown.out
    assert whole_step(folder) == "global_step9"


def test_no_whole_step(finished, config, tmp_path):
    """Never from the beginning without a word: what is there is named, and stays."""
    folder = shutil.copytree(finished, tmp_path / "run")
    truncate(folder / "global_step3")
    flip_a_bit(folder / "global_step6")
    before = sorted(folder.rglob("*"))
    with pytest.raises(checkpoint.CheckpointError, match="no step of it is whole") as caught:
        train(config(**RUN))
    assert "global_step3" in str(caught.value) and "global_step6" in str(caught.value)
    assert sorted(folder.rglob("*")) == before


def test_another_configuration_is_no_broken_step(finished, config, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(ConfigError, match="another configuration"):
        train(config(**RUN, seed=3))


def test_a_broken_step_does_not_count_among_those_kept(finished, config, tmp_path):
    """With 2 kept, the one that was gone on from must not give way to the broken ones."""
    folder = shutil.copytree(finished, tmp_path / "run")
    truncate(folder / "global_step6")
    train(config(**RUN, keep_last_n_checkpoints=2))
    assert {f.name for f in folder.glob("global_step*")} == {"global_step6", "global_step9"}
    again = shutil.copytree(finished, tmp_path / "again")
    for number in (20, 30):  # whole steps of a future that is no longer this run's
        shutil.copytree(again / "global_step6", again / f"global_step{number}")
    train(config("again", **RUN, keep_last_n_checkpoints=2))
    assert {checkpoint.step_number(f) for f in again.glob("global_step*")} == {6, 9, 20, 30}


# ---- disk full -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598"),
    ],
    ids=["errno", "torch"],
)
def test_a_full_disk(finished, config, tmp_path, monkeypatch, number, error):
    """At any file: one message with folder and missing bytes, the last step as it was, no leftovers."""
    folder = shutil.copytree(finished, tmp_path / "run")
    before = {f: f.read_bytes() for f in (folder / "global_step6").iterdir()}
    original, calls = torch.save, []

    def save(content, path, **options):
        calls.append(path)
        if len(calls) > number:
            Path(path).write_bytes(b"torn")
            monkeypatch.setattr(saving, "free_bytes", lambda _: 4096)
            raise error
        original(content, path, **options)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        train(config(**RUN))
    message = str(caught.value)
    assert message.startswith(f"{folder}: the disk is full: the checkpoint of iteration 9 takes ")
    assert "4,096 are free, at least" in message and "bytes are missing" in message
    assert "global_step6 is untouched" in message
    assert before == {f: f.read_bytes() for f in (folder / "global_step6").iterdir()}
    assert whole_step(folder) == "global_step6"
    assert {f.name for f in folder.glob("*global_step*")} == {"global_step3", "global_step6"}
    monkeypatch.undo()
    train(config(**RUN))
    assert tools.losses(folder) == tools.losses(finished)


@pytest.mark.parametrize("harm", ["bit", "half"])
def test_what_changes_between_writing_and_hashing(finished, config, tmp_path, monkeypatch, harm):
    """The hash alone would certify it: a disk that lies, or another program."""
    folder = shutil.copytree(finished, tmp_path / "run")
    original = manifest.record

    def record(file, **options):
        if file.suffix == ".pt" and file.parent.name == "writing-global_step9":
            content = bytearray(file.read_bytes())
            if harm == "bit":
                content[len(content) // 3] ^= 8
            else:
                content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
            file.write_bytes(content)
        return original(file, **options)

    monkeypatch.setattr(manifest, "record", record)
    with pytest.raises(checkpoint.CheckpointError, match=r"\.pt: is not what was written: "):
        train(config(**RUN))
    assert whole_step(folder) == "global_step6"
    assert {f.name for f in folder.glob("*global_step*")} == {"global_step3", "global_step6"}
    monkeypatch.undo()
    train(config(**RUN))
    assert tools.losses(folder) == tools.losses(finished)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_*_optim_states.pt"])
def test_what_is_lost_between_writing_and_listing(finished, config, tmp_path, monkeypatch, name):
    """A manifest of what is left would certify a step that cannot be resumed from."""
    folder = shutil.copytree(finished, tmp_path / "run")
    original = saving._records

    def records(aside, *arguments):
        next(aside.glob(name)).unlink()
        return original(aside, *arguments)

    monkeypatch.setattr(saving, "_records", records)
    with pytest.raises(checkpoint.CheckpointError, match=r"_states\.pt: was written, and is gone"):
        train(config(**RUN))
    assert whole_step(folder) == "global_step6"
    assert {f.name for f in folder.glob("*global_step*")} == {"global_step3", "global_step6"}
    monkeypatch.undo()
    train(config(**RUN))
    assert tools.losses(folder) == tools.losses(finished)


def test_no_room_is_noticed_before_anything_is_written(finished, config, tmp_path, monkeypatch):
    """The last step tells how much is needed; before there is one, weights and moments do."""
    folder = shutil.copytree(finished, tmp_path / "run")
    size = sum(f.stat().st_size for f in (folder / "global_step6").iterdir())
    monkeypatch.setattr(torch, "save", lambda *_, **__: pytest.fail("wrote"))
    monkeypatch.setattr(saving, "free_bytes", lambda _: size - 1000)
    with pytest.raises(checkpoint.CheckpointError, match=r"at least 1,000 bytes are missing"):
        train(config(**RUN))
    assert whole_step(folder) == "global_step6"
    parameters = json.loads((folder / "run.json").read_text())["parameters"]
    monkeypatch.setattr(saving, "free_bytes", lambda _: 3 * 4 * parameters - 1000)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"at least 1,\d\d\d bytes .*no earlier one"
    ):
        train(config("first", **RUN))


def test_a_log_that_cannot_be_written_is_named(finished, config, tmp_path, monkeypatch):
    """/dev/full takes no byte; what the run had saved is there."""
    monkeypatch.setattr(watch, "forget_after", lambda *_: None)  # reading the device has no end
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "log.jsonl").unlink()
    (folder / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: .*log.jsonl"):
        train(config(**RUN))
    assert whole_step(folder) == "global_step6"


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(bytes) -> a folder on a file system of that size."""
    place = tmp_path / "disk"
    place.mkdir()

    def make(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system is not allowed here")
        return place

    yield make
    subprocess.run(["umount", str(place)], capture_output=True)


@pytest.mark.parametrize("spare", [0.2, 0.97])
def test_a_disk_that_is_really_full(text, finished, small_disk, spare):
    """Room for two checkpoints and for `spare` of a third: too little from the start, or in the end."""
    size = sum(f.stat().st_size for f in (finished / "global_step6").iterdir())
    place = small_disk(int((2 + spare) * size) + (1 << 16))
    config = tools.tiny(text, place / "run", **RUN)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        train(config)
    assert "the disk is full: the checkpoint of iteration 9" in str(caught.value)
    assert "global_step6 is untouched" in str(caught.value)
    assert whole_step(place / "run") == "global_step6"
    shutil.rmtree(place / "run" / "global_step3")
    folder = train(config)
    assert tools.losses(folder) == tools.losses(finished)
