"""A checkpoint is whole or not there: killed at every step on the disk."""

from __future__ import annotations

import builtins
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import standalone_tools as tools
import torch

from megatron_patches.standalone import checkpoint, runtime
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
    assert tools.whole_step(trainer.folder) == "global_step8" and steps_on_disk >= 20
    assert [f.name for f in trainer.folder.glob("*global*")] == ["global_step8"]
    for fatal in range(steps_on_disk):
        dies_at(fatal)
        named.append(tools.whole_step(trainer.folder))
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
