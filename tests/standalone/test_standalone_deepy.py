"""The launcher: what it refuses, what it writes, and that DeepSpeed really starts processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import standalone_tools as tools
import yaml

import deepy
from megatron_patches.config import compose, config_sha
from megatron_patches.standalone import hostfile, provenance
from megatron_patches.standalone.checkpoint import load_model


@pytest.fixture
def file(text, tmp_path) -> Path:
    path = tmp_path / "toy.yml"
    path.write_text(yaml.safe_dump(tools.settings(text, tmp_path / "run", optimizer=None)))
    return path


@pytest.fixture
def refusal(file, capsys):
    """refusal(*arguments) -> the message with which `deepy.py train.py toy.yml ...` ends, code 2."""

    def message(*arguments: str) -> str:
        assert deepy.main(["train.py", str(file), *arguments]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error: ") and "Traceback" not in shown
        return shown

    return message


def add(file: Path, **keys: object) -> None:
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **keys}))


def test_dry_run_describes_and_starts_nothing(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(deepy, "start", lambda *_: pytest.fail("started"))
    assert deepy.main(["--dry-run", "train.py", str(file), "--set", "train_iters=50"]) == 0
    shown = capsys.readouterr().out
    assert "--set train_iters=50" in shown
    resolved = shown[shown.index("checkpoint_factor") : shown.index("\nrun ")]
    assert yaml.safe_load(resolved)["train_iters"] == 50
    for line in (
        "8,648 parameters, vocabulary 64 (padded)",
        "kerple_log (table), shared by model",
        "on cpu, float32",
        "1, ZeRO stage 0",
        "4 x 1 x 1 = 4 sequences of 32 = 128 tokens a step",
        "50 steps, 6,400 tokens",
        "nonoverlap at 32, 64",
    ):
        assert line in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("fire", {"width": 2.5}, "fire: width=2.5 must be an integer"),
        ("dape", {"width": "wide"}, "dape: width='wide' must be an integer"),
        ("cope", {"divide": "false"}, "cope: divide='false' must be true or false, without quotes"),
        ("fire", {"width": 0}, "fire: width=0 must be positive"),
    ],
    ids=str,
)
def test_a_value_that_the_method_refuses_is_a_wrong_configuration(
    method, options, said, file, refusal
):
    add(file, pos_emb=method, position_options=options)
    assert refusal("--dry-run") == f"error: {said}\n"


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ("local_code", r"\(python -m data_prep local_code --output 'here/the text'\)"),
        ("openwebtext2", r"\(python -m data_prep openwebtext2\)"),
        ("mine", r"\(python -m data_prep --help\)"),
    ],
)
def test_text_that_is_not_prepared_yet(dataset, said, refusal, file):
    keys = yaml.safe_load(file.read_text())
    del keys["padded_vocab_size"]
    file.write_text(yaml.safe_dump({**keys, "dataset": dataset}))
    paths = "train_data_paths=[here/the text/train]"
    shown = refusal("--dry-run", "--set", paths, "--set", "tokenizer_type=HFTokenizer")
    assert re.search(f"the vocabulary is unknown: prepare the data first {said}", shown)


def test_a_plan_names_the_data_that_are_not_here(file, text, tmp_path, capsys):
    assert deepy.main(["--dry-run", "train.py", str(file)]) == 0
    assert "not here" not in capsys.readouterr().out
    here, gone = f"{text}/train", f"{tmp_path}/gone/train"
    parts = [f"{part}_data_paths=[{here},{gone}]" for part in ("train", "valid", "test")]
    sets = [word for part in parts for word in ("--set", part)]
    assert deepy.main(["--dry-run", "train.py", str(file), *sets]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^data +not here: {gone}, {gone}, {gone} \(python -m", shown, re.M)


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_file_where_the_run_should_be(below, tmp_path, refusal):
    taken = tmp_path / "taken"
    taken.write_text("")
    for more in ([], ["--dry-run"]):
        assert f"{taken} is no folder" in refusal("--set", f"save={taken}{below}", *more)
    assert not taken.read_text()


def test_the_resolved_file_is_what_starts(file, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(deepy, "start", lambda *arguments: started.append(arguments) or 0)
    second = tmp_path / "second.yml"
    second.write_text("position_sharing: layer\n")
    arguments = ["train.py", str(file), str(second), "--set", "optimizer.params.lr=2.0e-3"]
    assert deepy.main(arguments) == 0
    ((worker, resolved, config, processes, hosts),) = started
    assert (worker, processes, hosts) == ("train.py", 1, None)
    assert resolved == tmp_path / "run" / "config.yml"
    asked = compose([file, second], ["optimizer.params.lr=2.0e-3"])
    assert compose([resolved]) == asked == config
    assert config_sha(compose([resolved])) == config_sha(asked)
    assert not list((tmp_path / "run").glob(".*"))


def test_evaluation_does_not_touch_the_run_file(file, tmp_path, monkeypatch):
    monkeypatch.setattr(deepy, "start", lambda *_: 0)
    assert deepy.main(["train.py", str(file)]) == 0
    before = (tmp_path / "run" / "config.yml").read_bytes()
    assert deepy.main(["eval.py", str(file), "--set", "eval_protocol=position"]) == 0
    assert (tmp_path / "run" / "config.yml").read_bytes() == before
    assert compose([tmp_path / "run" / "eval.yml"]).eval_protocol == "position"


def test_a_folder_of_another_run(file, refusal, monkeypatch):
    monkeypatch.setattr(deepy, "start", lambda *_: 0)
    assert deepy.main(["train.py", str(file)]) == 0
    assert deepy.main(["train.py", str(file), "--set", "seed=8"]) == 0  # nothing was trained yet
    assert deepy.main(["train.py", str(file)]) == 0
    (compose([file]).save_dir / "log.jsonl").touch()
    assert deepy.main(["train.py", str(file), "--set", "log_interval=3"]) == 0  # the same model
    told = refusal("--set", "seed=9", "--set", "optimizer.params.lr=2.0e-3")
    assert "holds a run of another configuration" in told
    assert "`optimizer.params.lr` (--set) is 0.002, was 0.001, `seed` (--set) is 9, was " in told


@pytest.mark.parametrize("with_suffix", [True, False])
def test_the_folder_of_configurations_as_in_neox(file, tmp_path, monkeypatch, with_suffix):
    started = []
    monkeypatch.setattr(deepy, "start", lambda *arguments: started.append(arguments) or 0)
    name = "toy.yml" if with_suffix else "toy"
    assert deepy.main(["train.py", "-d", str(tmp_path), name]) == 0
    assert started[0][2] == compose([file])


def test_the_worker_is_one_of_three(file, capsys):
    for worker in ("pretrain.py", "/elsewhere/train.py", "../train.py"):
        assert deepy.main([worker, str(file)]) == 2
        assert "the workers are train.py, eval.py, generate.py" in capsys.readouterr().err


def test_every_problem_of_the_files_is_told(refusal, file):
    add(file, hiden_size=3)
    shown = refusal("--set", "train_iters=many", "--set", "hidden_dropout=0.1")
    assert "hiden_size" in shown and "hidden_size" in shown and "train_iters" in shown
    assert "no such file" in refusal("nowhere.yml")


def test_what_the_engine_cannot_honour(refusal):
    assert "hidden_dropout" in refusal("--set", "hidden_dropout=0.1")


def test_batches_that_do_not_fit_the_processes(refusal):
    shown = refusal("--set", "train_batch_size=6", "--set", "num_gpus=3")
    assert "train_batch_size" in shown and "6" in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("", "names no hosts"),
        ("# only a remark\n", "names no hosts"),
        ("node1\n", "expected `HOST slots=N`"),
        ("node1 slots=two\n", "expected `HOST slots=N`"),
        ("node1 gpus=2\n", "expected `HOST slots=N`"),
        ("node1 slots=2\nnode1 slots=2\n", r"2: expected `HOST slots=N`, each host once"),
        ("node1 slots=2 extra\n", "expected `HOST slots=N`"),
        ("node1 slots=0\n", "hosts:1: expected `HOST slots=N`"),
        ("# a remark\nnode1 slots=-1\n", "hosts:2: expected `HOST slots=N`"),
        ("node1 slots=\u0664\n", "hosts:1: expected `HOST slots=N`"),
        ("node1 slots=999999\n", "hosts:1: expected `HOST slots=N`"),
        ("-oProxyCommand=touch slots=1\n", "hosts:1: expected `HOST slots=N`"),
        ("node1;reboot slots=1\n", "hosts:1: expected `HOST slots=N`"),
        ("\u2028node1 slots=1 slots=2\n", "hosts:1: expected `HOST slots=N`"),
        ("node1 slots=1\n" + "#" * (1 << 20), "larger than 1,048,576 bytes"),
    ],
)
def test_hostfiles(file, tmp_path, refusal, content, message):
    hosts = tmp_path / "hosts"
    if content is not None:
        hosts.write_text(content)
    add(file, hostfile=str(hosts))
    assert message in refusal()


def test_a_hostfile_of_bytes_that_are_no_text(file, tmp_path, refusal):
    (tmp_path / "hosts").write_bytes(b"node1 slots=1\n\xff\xfe slots=1\n")
    add(file, hostfile=str(tmp_path / "hosts"))
    assert "hosts:2: expected `HOST slots=N`" in refusal()


def test_more_processes_than_slots(file, tmp_path, refusal):
    """DeepSpeed would start them all the same."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4\n127.0.0.1 slots=2\n")
    add(file, hostfile=str(hosts))
    shown = refusal("--set", "num_gpus=3")
    assert f"{hosts}:2: 127.0.0.1 has slots=2, fewer than `num_gpus` (--set) 3" in shown


def test_a_launcher_that_is_not_installed(file, tmp_path, refusal, monkeypatch):
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    add(file, hostfile=str(tmp_path / "hosts"), launcher="pdsh")
    assert "pdsh is not installed here, and starts the processes on 127.0.0.1" in refusal()


SSH = """#!/bin/sh
for word; do :; host=$before; before=$word; done
[ "$host" = 127.0.0.2 ] && exit 0
echo "ssh: connect to host $host port 22: No route to host" >&2
exit 255
"""


def test_hosts_that_ssh_does_not_reach(tmp_path, monkeypatch):
    """Every one is named; DeepSpeed tries the first one alone."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hostfile.reach(["127.0.0.2"])
    with pytest.raises(RuntimeError, match="no process was started") as caught:
        hostfile.reach(["127.0.0.2", "127.0.0.3", "127.0.0.4"])
    for host in ("127.0.0.3", "127.0.0.4"):
        assert f"host {host} cannot be reached by ssh (ssh: connect to host {host}" in str(
            caught.value
        )
    assert "host 127.0.0.2" not in str(caught.value)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match="ssh is not installed here"):
        hostfile.reach(["127.0.0.2"])


def test_a_host_that_does_not_exist(file, tmp_path, refusal):
    hosts = tmp_path / "hosts"
    hosts.write_text("no-such-host.invalid slots=2\n")
    add(file, hostfile=str(hosts), distributed_backend="nccl")
    assert "host 'no-such-host.invalid' cannot be found" in refusal()


def test_several_nodes_need_a_hostfile(file, refusal):
    add(file, num_nodes=2)
    assert "`num_nodes`" in refusal() and "hostfile" in refusal()


def test_processes_of_a_hostfile(file, tmp_path, monkeypatch):
    """Counting them starts nothing, so any program of that name will do."""
    program = tmp_path / "bin" / "pdsh"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4 # the first\n\n127.0.0.1 slots=2\n")
    add(file, hostfile=str(hosts))
    config = compose([file])
    found = deepy.read_hostfile(config)
    assert found == {"localhost": 4, "127.0.0.1": 2} and deepy.process_count(config, found) == 6
    assert deepy.process_count(compose([file], ["num_gpus=2"]), found) == 4


def launch(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(tools.ROOT / "deepy.py"), *arguments],
        cwd=tools.ROOT,
        env={**tools.clean_environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_deepspeed_starts_one_and_two_processes(file, tmp_path):
    """One process fails as it should, two train; the file that starts is the resolved one."""
    add(file, train_iters=2)
    two = ["--set", "num_gpus=2", "--set", "train_micro_batch_size_per_gpu=2"]
    done = launch("train.py", str(file), *two)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "run"
    assert [row["tokens"] for row in tools.log(folder)] == [128, 256]
    assert "2 process(es) on cpu" in done.stderr
    assert load_model(folder) is not None

    damaged = folder / "global_step2" / "mp_rank_00_model_states.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    alone = launch("eval.py", str(file), *two)
    assert alone.returncode == 1
    (line,) = [line for line in alone.stderr.splitlines() if line.startswith("error: ")]
    assert "mp_rank_00_model_states.pt: damaged" in line and "Traceback" not in alone.stderr


SRUN = """#!/usr/bin/env bash
shift  # --ntasks=2
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 "$@" &
    tasks="$tasks $!"
done
for task in $tasks; do wait $task || exit 1; done
"""


def test_slurm_starts_the_tasks_of_an_allocation(file, tmp_path):
    """With a stand-in for srun: two tasks find each other through Slurm's variables."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    add(file, launcher="slurm", master_port=port, train_iters=2)
    path = f"{srun.parent}:{os.environ['PATH']}"
    env = {"PATH": path, "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    done = launch("train.py", str(file), env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 process(es)" in done.stderr
    assert provenance.read_run(compose([file]).save_dir)["processes"] == 2


def test_slurm_outside_an_allocation_is_refused(refusal, monkeypatch):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert "start this inside an allocation" in refusal("--set", "launcher=slurm")


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_hosts_are_chosen_in_the_hostfile(refusal, key):
    assert "list the hosts that shall run" in refusal("--set", f"{key}=localhost")


def test_the_workers_run_alone(trained):
    """As a user calls them: plain commands, help with an example, a refusal without a traceback."""
    for worker in deepy.WORKERS:
        assert os.access(tools.ROOT / worker, os.R_OK)
    done = subprocess.run(
        [sys.executable, "eval.py", "--checkpoint", str(trained), "--lengths", "32"],
        cwd=tools.ROOT,
        env=tools.clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "kerple_log at 32: perplexity" in done.stdout
