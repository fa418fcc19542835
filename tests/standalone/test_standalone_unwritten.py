"""Checkpoints that cannot be written, or not as they were meant: the one before stays."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import standalone_tools as tools
import torch

from megatron_patches.standalone import checkpoint, manifest, saving, watch
from megatron_patches.standalone.train import train


def assert_goes_on(folder, finished, config):
    """The save of step 9 left the steps before as they were, and the next start finishes the run."""
    assert tools.whole_step(folder) == "global_step6"
    assert {f.name for f in folder.glob("*global_step*")} == {"global_step3", "global_step6"}
    train(config(**tools.THREE_STEPS))
    assert tools.losses(folder) == tools.losses(finished)


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
        train(config(**tools.THREE_STEPS))
    message = str(caught.value)
    assert message.startswith(f"{folder}: the disk is full: the checkpoint of iteration 9 takes ")
    assert "4,096 are free, at least" in message and "bytes are missing" in message
    assert "global_step6 is untouched" in message
    assert before == {f: f.read_bytes() for f in (folder / "global_step6").iterdir()}
    monkeypatch.undo()
    assert_goes_on(folder, finished, config)


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
        train(config(**tools.THREE_STEPS))
    monkeypatch.undo()
    assert_goes_on(folder, finished, config)


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
        train(config(**tools.THREE_STEPS))
    monkeypatch.undo()
    assert_goes_on(folder, finished, config)


def test_no_room_is_noticed_before_anything_is_written(finished, config, tmp_path, monkeypatch):
    """The last step tells how much is needed; before there is one, weights and moments do."""
    folder = shutil.copytree(finished, tmp_path / "run")
    size = sum(f.stat().st_size for f in (folder / "global_step6").iterdir())
    monkeypatch.setattr(torch, "save", lambda *_, **__: pytest.fail("wrote"))
    monkeypatch.setattr(saving, "free_bytes", lambda _: size - 1000)
    with pytest.raises(checkpoint.CheckpointError, match=r"at least 1,000 bytes are missing"):
        train(config(**tools.THREE_STEPS))
    assert tools.whole_step(folder) == "global_step6"
    parameters = json.loads((folder / "run.json").read_text())["parameters"]
    monkeypatch.setattr(saving, "free_bytes", lambda _: 3 * 4 * parameters - 1000)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"at least 1,\d\d\d bytes .*no earlier one"
    ):
        train(config("first", **tools.THREE_STEPS))


def test_a_log_that_cannot_be_written_is_named(finished, config, tmp_path, monkeypatch):
    """/dev/full takes no byte; what the run had saved is there."""
    monkeypatch.setattr(watch, "forget_after", lambda *_: None)  # reading the device has no end
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "log.jsonl").unlink()
    (folder / "log.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device: .*log.jsonl"):
        train(config(**tools.THREE_STEPS))
    assert tools.whole_step(folder) == "global_step6"


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
    config = tools.tiny(text, place / "run", **tools.THREE_STEPS)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        train(config)
    assert "the disk is full: the checkpoint of iteration 9" in str(caught.value)
    assert "global_step6 is untouched" in str(caught.value)
    assert tools.whole_step(place / "run") == "global_step6"
    shutil.rmtree(place / "run" / "global_step3")
    folder = train(config)
    assert tools.losses(folder) == tools.losses(finished)
