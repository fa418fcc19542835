"""`python -m megatron_patches.neox`: errors in one line, and what reaches the workers."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

import pytest
from neox_tools import STUB

from megatron_patches.neox import __main__ as command
from megatron_patches.neox import launch
from megatron_patches.neox.checkout import VARIABLE
from megatron_patches.neox.fixes import FIXES
from megatron_patches.neox.install import FIXES_OFF

pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def complete(monkeypatch):
    """All packages that GPT-NeoX needs are here; the launcher's list of names is as DeepSpeed's."""
    import deepspeed.launcher.runner as runner

    monkeypatch.setattr(launch, "_check_packages", lambda: None)
    monkeypatch.setattr(runner, "EXPORT_ENVS", list(runner.EXPORT_ENVS))
    monkeypatch.setenv(VARIABLE, str(STUB))
    return runner


@pytest.fixture
def launched(monkeypatch) -> list[Any]:
    """Calls of `launch` instead of the launches."""
    calls: list[Any] = []
    monkeypatch.setattr(command, "launch", lambda arguments, **k: calls.append((arguments, k)))
    return calls


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    return err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "WORKER.py"),
        (["--without", "speling", "train.py"], "speling"),
        (["--cpu", "two", "train.py"], "'two' is not an integer of at least 1"),
        (["--cpu", "0", "train.py"], "'0' is not an integer of at least 1"),
    ],
)
def test_usage_errors(capsys, launched, arguments, expected):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2 and expected in one_line(capsys) and launched == []


@pytest.mark.parametrize("worker", ["trian.py", "", "workers/__init__.py", "deepy.py"])
def test_an_unknown_worker(complete, capsys, worker):
    assert command.main([worker]) == 2
    assert "the workers are eval.py, generate.py, train.py" in one_line(capsys)


def test_no_checkout(complete, monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE)
    assert command.main(["train.py", "x.yml"]) == 2
    assert "NEOX_HOME is not set" in one_line(capsys)


def test_missing_packages_are_named_together(monkeypatch, capsys):
    monkeypatch.setattr(launch, "NEEDED", ("json", "no_such_package", "nor_this_one"))
    assert command.main(["train.py", "x.yml"]) == 2
    told = one_line(capsys)
    assert "needs no_such_package, nor_this_one: " in told and ".[neox]" in told


def test_missing_tools(monkeypatch, capsys):
    monkeypatch.setattr(launch, "NEEDED", ())
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "g++" else name)
    assert command.main(["train.py", "x.yml"]) == 2
    assert "needs g++" in one_line(capsys)


def test_debug_shows_the_traceback(complete):
    with pytest.raises(launch.ConfigError, match="the workers are"):
        command.main(["--debug", "trian.py"])


def test_neoxs_own_arguments_follow_in_their_order(launched):
    rest = ["-d", "configs", "small.yml", "local.yml", "--wandb_group", "a"]
    assert command.main(["--without", "rpe_cache", "train.py", *rest]) == 0
    assert command.main(["deepy.py", "train.py", *rest]) == 0
    given = [(arguments, keywords["fixes_off"]) for arguments, keywords in launched]
    assert given == [(["train.py", *rest], off) for off in (["rpe_cache"], [])]


def test_processes_on_the_cpu(launched, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")
    command.main(["--cpu", "3", "train.py", "x.yml"])
    assert (os.environ["DS_ACCELERATOR"], os.environ["LOCAL_SIZE"]) == ("cpu", "3")


def test_help_names_every_fix(capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and all(name in shown for name in FIXES)


def test_a_dry_run_checks_and_starts_nothing(complete, tmp_path, capfd):
    config = tmp_path / "run.json"
    values = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "pos_emb": "kerple_log"}
    config.write_text(json.dumps(values), encoding="utf-8")
    assert command.main(["--dry-run", "train.py", str(config)]) == 0
    assert "worker" not in capfd.readouterr().out
    config.write_text(json.dumps(values | {"te_mha": True}), encoding="utf-8")
    assert command.main(["--dry-run", "train.py", str(config)]) == 2
    told = capfd.readouterr().err
    assert "\nerror: " in f"\n{told}" and "te_mha: Transformer Engine" in told


def test_from_the_command_line_to_the_worker(complete, tmp_path, capfd):
    """The stub's launcher starts our worker as DeepSpeed does, which runs the stub's script."""
    config = tmp_path / "run.json"
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pos_emb": "kerple_power_ap_",
        "position_init": "alibi",
        "attention_config": [[["attend", "global"], 1]],
    }
    config.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        command.main(["--cpu", "1", "--without", "rpe_cache", "generate.py", str(config)])
    out, err = capfd.readouterr()
    assert caught.value.code == 0, err
    launcher, exported, worker = (json.loads(x) for x in out.splitlines() if x.startswith("{"))
    assert launcher == {"launcher": "kerple_power"}
    assert worker["worker"] == "generate"
    got = worker["arguments"]
    assert (got["pos_emb"], got["position_init"]) == ("kerple_power", "alibi")
    assert got["attention_config"] == ["attend", "global"]
    expected = {
        VARIABLE: str(STUB),
        FIXES_OFF: "rpe_cache",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.environ.get("PYTHONPATH"),
    }
    assert expected.items() <= exported["exported"].items()
    assert set(launch.EXPORTED) <= set(complete.EXPORT_ENVS)
    # NeoX's Makefile calls python3, on every host.
    assert worker["path"].split(os.pathsep)[0] == os.path.dirname(sys.executable)


def test_names_are_exported_once(complete, monkeypatch):
    before = list(complete.EXPORT_ENVS)
    monkeypatch.setattr(launch.runpy, "run_path", lambda *_, **__: {"main": lambda _: None})
    for _ in range(2):
        launch.launch(["train.py", "x.yml"])
    added = complete.EXPORT_ENVS[len(before) :]
    assert sorted(added) == sorted(set(launch.EXPORTED) - set(before))
