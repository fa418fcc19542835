"""Two processes that stop and go on, on as many processes or on another number; and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standalone_tools as tools
import torch
import yaml

from megatron_patches.config import ConfigError, from_mapping
from megatron_patches.standalone import checkpoint, signals
from megatron_patches.standalone.train import Trainer, train

WORKER = Path(__file__).with_name("standalone_resume_worker.py")
CASES = [(1, 0), (4, 1), (1, 2), (4, 3)]
BF16 = {"precision": "bfloat16"}
COMMON = {"train_iters": 12, "checkpoint_factor": 6, "log_interval": 5}


def made(text: Path, save: Path, processes: int, **changes: Any) -> dict[str, Any]:
    """Eight sequences a step, whatever the split."""
    accumulation = changes.get("gradient_accumulation_steps") or 1
    micro = {"train_micro_batch_size_per_gpu": 8 // processes // accumulation}
    return tools.settings(text, save, **{**COMMON, **micro, **changes})


def case(accumulation: int, zero: int) -> dict[str, Any]:
    return {"gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": zero}}


def elastic(zero: int, **changes: Any) -> dict[str, Any]:
    """The same configuration on any number of processes: the whole batch is fixed."""
    none = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    return {**none, "train_batch_size": 8, "zero_optimization": {"stage": zero}, **changes}


def half(text: Path, save: Path, **changes: Any) -> None:
    """The first 9 of 12 steps of a run in this process; the last checkpoint is that of step 6."""

    class Stopped(BaseException):
        pass

    def one_step(self, *arguments):
        if self.step == 9:
            raise Stopped
        return original(self, *arguments)

    original, Trainer._one_step = Trainer._one_step, one_step
    try:
        train(from_mapping(made(text, save, 1, **changes)))
    except Stopped:
        pass
    finally:
        Trainer._one_step = original


@pytest.fixture(scope="module")
def place(text, tmp_path_factory) -> Path:
    """Everything that two processes do for these tests, in one start of them."""
    folder = tmp_path_factory.mktemp("ranks")
    plan: list[Any] = []
    for accumulation, zero in CASES:
        name, changes = f"{accumulation}-{zero}", case(accumulation, zero)
        plan.append(["train", made(text, folder / f"straight{name}", 2, **changes)])
        plan.append(["stop", made(text, folder / f"resumed{name}", 2, **changes)])
        plan.append(["train", made(text, folder / f"resumed{name}", 2, **changes)])
    for zero in (0, 1, 2, 3):
        name, what = f"one-to-two{zero}", "refused" if zero else "train"
        half(text, folder / name, **elastic(zero))
        plan.append([what, made(text, folder / name, 2, **elastic(zero))])
        plan.append(["stop", made(text, folder / f"two-to-one{zero}", 2, **elastic(zero))])
    plan.append(["stop", made(text, folder / "two-to-one-bf16", 2, **elastic(0, **BF16))])
    plan.append(["signal", made(text, folder / "signalled", 2, **case(4, 1))])
    plan.append(["train", made(text, folder / "signalled", 2, **case(4, 1))])
    file = folder / "plan.yml"
    file.write_text(yaml.safe_dump(plan))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", str(WORKER), str(file)]
    done = subprocess.run(
        command,
        cwd=tools.ROOT,
        env=tools.clean_environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "output").write_text(done.stdout)
    return folder


def assert_same_run(found: Path, wanted: Path) -> None:
    """Bit for bit: everything in the log but speeds, and every stored weight."""
    speeds = ("tokens_per_second", "steps_per_second")
    rows = [
        [{k: v for k, v in row.items() if k not in speeds} for row in tools.log(folder)]
        for folder in (found, wanted)
    ]
    assert rows[0] == rows[1] and len(rows[0]) >= 3
    tools.assert_same(tools.weights(found), tools.weights(wanted))


@pytest.mark.parametrize(("accumulation", "zero"), CASES)
def test_two_processes_go_on_exactly(place, accumulation, zero):
    """Stopped after 9 steps, that is 3 behind the checkpoint, within an interval of the log."""
    name = f"{accumulation}-{zero}"
    assert_same_run(place / f"resumed{name}", place / f"straight{name}")


@pytest.mark.parametrize(("accumulation", "zero"), [(4, 0), (1, 2)])
def test_one_process_goes_on_exactly(text, tmp_path, accumulation, zero):
    changes = case(accumulation, zero)
    straight = train(from_mapping(made(text, tmp_path / "straight", 1, **changes)))
    half(text, tmp_path / "resumed", **changes)
    assert (tmp_path / "resumed" / "latest").read_text() == "global_step6"
    assert_same_run(train(from_mapping(made(text, tmp_path / "resumed", 1, **changes))), straight)


def assert_like(found: Path, wanted: Path) -> None:
    """The same samples and rates; numbers up to the order of sums over ranks."""
    for key in ("iteration", "consumed_sha", "learning_rate"):
        assert [row[key] for row in tools.log(found)] == [row[key] for row in tools.log(wanted)]
    np.testing.assert_allclose(tools.losses(found), tools.losses(wanted), rtol=1e-5)
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(
        checkpoint.load_model(found)(tokens),
        checkpoint.load_model(wanted)(tokens),
        atol=1e-3,
        rtol=1e-3,
    )


def test_another_number_of_processes(place, text):
    """ZeRO 0 keeps whole states: either way it goes on with the same samples."""
    assert_like(place / "one-to-two0", place / "straight1-0")
    assert json.loads((place / "one-to-two0" / "run.json").read_text())["processes"] == 2
    one = train(from_mapping(made(text, place / "two-to-one0", 1, **elastic(0))))
    assert_like(one, place / "straight1-0")


def test_another_number_of_processes_in_bfloat16(place, text):
    found = train(from_mapping(made(text, place / "two-to-one-bf16", 1, **elastic(0, **BF16))))
    wanted = train(from_mapping(made(text, place / "one-bf16", 1, **elastic(0, **BF16))))
    for key in ("iteration", "consumed_sha", "learning_rate"):
        assert [row[key] for row in tools.log(found)] == [row[key] for row in tools.log(wanted)]
    np.testing.assert_allclose(tools.losses(found), tools.losses(wanted), rtol=1e-3)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_slices_of_another_number_of_processes_are_refused(place, text, zero):
    message = "this run has processes 2, now it is 1: DeepSpeed's ZeRO resumes on the same number"
    with pytest.raises(ConfigError, match=message):
        train(from_mapping(made(text, place / f"two-to-one{zero}", 1, **elastic(zero))))
    told = [line for line in (place / "output").read_text().splitlines() if "refused" in line]
    named = [line for line in told if f"one-to-two{zero}" in line]
    assert len(named) == 2 and all("processes 1, now it is 2" in line for line in named)
    # Nothing is lost: the weights can be read on any number.
    assert checkpoint.load_model(place / f"two-to-one{zero}") is not None


def test_a_signal_to_one_rank_stops_all_after_the_same_step(place):
    # Not line by line: what two ranks print at once may share a line.
    text = (place / "output").read_text()
    said = re.findall(
        r"(SIGUSR1|a signal on another rank): \S+ is saved at iteration (\d+) of 12", text
    )
    assert sorted(said) == [("SIGUSR1", "5"), ("a signal on another rank", "5")]
    assert (place / "signalled" / "global_step5").is_dir()
    assert_same_run(place / "signalled", place / "straight4-1")


# ---- signals in one process ------------------------------------------------------------------


def send(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    original = Trainer._one_step

    def one_step(self, *arguments):
        if self.step == step:
            os.kill(os.getpid(), number)
            while self.signals.asked is None:
                time.sleep(0.01)
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, "_one_step", one_step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_ends(config, monkeypatch, number):
    """In the middle of a step, of an interval of the log, and far from the next checkpoint."""
    straight = train(config("straight", log_interval=4))
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        send(patch, 2, number)
        with pytest.raises(
            signals.Interrupted, match="saved at iteration 3 of 6; the same command"
        ):
            train(config(log_interval=4))
    assert signal.getsignal(number) is before
    assert [f.name for f in config().save_dir.glob("*global_step*")] == ["global_step3"]
    assert_same_run_short(train(config(log_interval=4)), straight)


def assert_same_run_short(found: Path, wanted: Path) -> None:
    assert tools.losses(found) == tools.losses(wanted)
    assert [row["consumed_sha"] for row in tools.log(found)] == [
        row["consumed_sha"] for row in tools.log(wanted)
    ]
    tools.assert_same(tools.weights(found), tools.weights(wanted))


def test_a_signal_in_the_last_step_changes_nothing(config, monkeypatch):
    send(monkeypatch, 5, signal.SIGTERM)
    assert (train(config()) / "latest").read_text() == "global_step6"


def test_a_signal_right_after_a_checkpoint_saves_no_second_time(config, monkeypatch):
    saves, original = [], Trainer.save
    monkeypatch.setattr(Trainer, "save", lambda self: (saves.append(self.step), original(self)))
    send(monkeypatch, 2, signal.SIGTERM)
    with pytest.raises(signals.Interrupted):
        train(config(checkpoint_factor=3))
    assert saves == [3]


TWICE = """
import os, signal, sys, time
from megatron_patches.standalone import signals
signals.ONE_REQUEST = 0.3
with signals.Signals() as asked:
    for wait in (0.6, 0.6):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(wait)
        print(asked.asked, flush=True)
print("not ended")
"""


def test_a_second_signal_ends_at_once():
    """Copies of one request, which launchers and schedulers make, are not a second one."""
    done = subprocess.run(
        [sys.executable, "-c", TWICE], cwd=tools.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (128 + signal.SIGTERM, 128 + signal.SIGUSR1), done.stderr
    assert done.stdout in ("SIGTERM\n", "SIGUSR1\n")
