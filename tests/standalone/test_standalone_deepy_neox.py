"""`deepy.py --engine neox`: what is checked here, what is handed over, and how."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import standalone_tools as tools
import yaml

import deepy
from megatron_patches.config import batch_arithmetic, compose
from megatron_patches.neox import handover
from megatron_patches.standalone.foreign import starting_step

STUB = Path(__file__).resolve().parents[1] / "neox" / "stub"


@pytest.fixture
def file(text, tmp_path):
    path = tmp_path / "toy.yml"
    path.write_text(yaml.safe_dump(tools.settings(text, tmp_path / "run")))
    return path


@pytest.fixture
def started(monkeypatch):
    """The calls of subprocess.run with their environment; each returns the code in `started.code`."""
    monkeypatch.setenv("NEOX_HOME", str(STUB))
    found = SimpleNamespace(commands=[], environments=[], code=0)
    real = subprocess.run

    def run(command, **kwargs):
        if "megatron_patches.neox" not in command:
            return real(command, **kwargs)
        found.commands.append(command)
        found.environments.append(kwargs["env"])
        return SimpleNamespace(returncode=found.code)

    monkeypatch.setattr(subprocess, "run", run)
    return found


def launch(*arguments: str) -> int:
    return deepy.main(["--engine", "neox", *arguments])


def test_no_checkout(file, monkeypatch, capsys):
    monkeypatch.delenv("NEOX_HOME", raising=False)
    assert launch("train.py", str(file)) == 2
    assert "NEOX_HOME is not set" in capsys.readouterr().err


def test_not_a_checkout(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NEOX_HOME", str(tmp_path))
    assert launch("train.py", str(file)) == 2
    assert "not a GPT-NeoX checkout" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_run_is_handed_over(file, started, tmp_path):
    assert launch("train.py", str(file), "--set", "num_gpus=2", "--set", "pos_emb=kerple_log") == 0
    (command,), (environment,) = started.commands, started.environments
    assert command[1:] == [
        "-m",
        "megatron_patches.neox",
        "train.py",
        str(tmp_path / "run/neox.yml"),
    ]
    assert environment["NEOX_HOME"] == str(STUB)
    assert (environment["DS_ACCELERATOR"], environment["LOCAL_SIZE"]) == ("cpu", "2")
    assert str(deepy.ROOT) in environment["PYTHONPATH"].split(":")
    asked = compose([file], ["num_gpus=2", "pos_emb=kerple_log"])
    assert compose([tmp_path / "run" / "config.yml"]) == asked
    handed = compose([tmp_path / "run" / "neox.yml"])
    batch = batch_arithmetic(asked, 2)
    assert handed.train_batch_size == batch.global_
    assert handed.train_micro_batch_size_per_gpu == batch.micro
    assert handed.gradient_accumulation_steps == batch.accumulation
    assert (handed.precision, handed.distributed_backend, handed.num_gpus) == ("fp32", "gloo", 2)
    assert handed.master_port != 29500  # a free one
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engine"] == "neox"


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (1, 1), (2, 2), (-9, 1), (137, 1)])
def test_the_exit_code(file, started, code, exit_code):
    started.code = code
    assert launch("train.py", str(file)) == exit_code


def test_a_dry_run_asks_neox_and_writes_nothing(file, started, tmp_path, capsys):
    assert launch("--dry-run", "train.py", str(file)) == 0
    assert started.commands[0][3:5] == ["--dry-run", "train.py"]
    assert not (tmp_path / "run").exists()
    assert "accepts this" in capsys.readouterr().out
    started.code = 2
    assert launch("--dry-run", "train.py", str(file)) == 2
    assert "accepts" not in capsys.readouterr().out


def test_fixes_are_left_out_on_request(file, started):
    assert launch("train.py", str(file), "--set", "neox_fixes_off=[rpe_cache, alibi_cache]") == 0
    assert started.commands[0][3:5] == ["--without=rpe_cache", "--without=alibi_cache"]


def test_slurm_needs_a_hostfile(file, started, capsys):
    assert launch("train.py", str(file), "--set", "launcher=slurm") == 2
    assert "needs a `hostfile`" in capsys.readouterr().err


def test_evaluation_is_ours_for_both_engines(file, started, monkeypatch):
    calls = []
    monkeypatch.setattr(deepy, "start", lambda *arguments: calls.append(arguments) or 0)
    assert launch("eval.py", str(file)) == 0
    assert calls[0][0] == "eval.py" and started.commands == []


@pytest.mark.parametrize("named", ["", "/global_step7", " with iteration"])
def test_where_a_run_starts(file, tmp_path, named):
    """From the step that `load` names in either way; once begun, from its own last one."""
    other = tmp_path / "other"
    (other / "global_step7").mkdir(parents=True)
    (other / "global_step9").mkdir()
    (other / "latest").write_text("global_step9")
    ways = {"": [f"load={other}"], "/global_step7": [f"load={other}/global_step7"]}
    load = ways.get(named, [f"load={other}", "iteration=7"])
    config = compose([file], [*load, "finetune=true", "checkpoint_factor=5"])

    def handed():
        first = starting_step(config)
        batch = batch_arithmetic(config, 1)
        made = handover.neox_config(config, batch, 1, cpu=True, port=1234, start=first)
        assert made.master_port == 1234
        return made.load, made.iteration, made.finetune

    assert handed() == (str(other), 7 if named else 9, True)
    (config.save_dir / "global_step3").mkdir(parents=True)
    (config.save_dir / "latest").write_text("global_step3")
    assert handed() == (str(config.save_dir), 3, False)


def test_a_start_that_is_not_there(file, started, tmp_path, capsys):
    for load in (["load=nowhere"], [f"load={tmp_path}", "iteration=4"]):
        sets = [word for change in load for word in ("--set", change)]
        assert launch("--dry-run", "train.py", str(file), *sets) != 0
        assert "nowhere" in (told := capsys.readouterr().err) or "global_step4" in told
    assert started.commands == []


def test_older_spellings_of_the_precision(file):
    changes = ["fp16={enabled: true, type: bfloat16}", "precision=null"]
    config = compose([file], changes)
    batch = batch_arithmetic(config, 1)
    handed = handover.neox_config(config, batch, 1, cpu=True, port=1, start=None)
    assert (handed.precision, handed.fp16) == ("bfloat16", None)
