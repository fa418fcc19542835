"""A run over two hosts: equal to one host's, cut in two while it trains, and what each side says.

The hosts are network namespaces of this machine (`standalone_nodes`), the connection between them a
veth pair; processes, gloo and the files are real.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import standalone_launching as launching
import standalone_nodes
import standalone_tools as tools
import yaml

from megatron_patches.standalone import evidence

LONG = 120.0  # seconds; a busy machine takes ten to start
STALL = 3
CHANGES = {
    **{"train_iters": 120, "checkpoint_factor": 10, "keep_last_n_checkpoints": 2},
    **{"train_micro_batch_size_per_gpu": 2, "watch_stall_seconds": STALL, "join_seconds": 60},
}


@pytest.fixture
def nodes():
    if reason := standalone_nodes.why_no_nodes():
        pytest.skip(reason)
    try:
        with standalone_nodes.two_nodes() as made:
            yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")


def write(path: Path, text: Path, save: Path, **changes: object) -> str:
    path.write_text(yaml.safe_dump(tools.settings(text, save, **{**CHANGES, **changes})))
    return str(path)


@pytest.fixture(scope="module")
def one_host(text, tmp_path_factory) -> Path:
    """The folder of the same run with both ranks on one host, unbroken."""
    folder = tmp_path_factory.mktemp("one_host")
    file = write(folder / "run.yml", text, folder / "run")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(launching.free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", file],
            cwd=tools.ROOT,
            env=launching.environment(**place, RANK=rank, LOCAL_RANK=rank),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    shown = [rank.communicate(timeout=LONG)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], shown
    return folder / "run"


def wait_for_step(folder: Path, step: int, *processes: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LONG
    log = folder / "log.jsonl"
    while not log.is_file() or log.read_bytes().count(b"\n") < step:
        for process in processes:
            assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.01)


def error_line(shown: str) -> str:
    (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    return line


def test_a_run_over_two_hosts_that_are_cut_apart(text, tmp_path, nodes, one_host):
    folder = tmp_path / "run"
    file = write(tmp_path / "run.yml", text, folder)
    ranks = [nodes.start(node, sys.executable, "train.py", file) for node in (0, 1)]
    wait_for_step(folder, 15, *ranks)
    nodes.link("down")
    cut = time.monotonic()
    shown = [rank.communicate(timeout=LONG)[1] for rank in ranks]
    assert time.monotonic() - cut < STALL + 20  # the rest is for asking, on a busy machine
    assert [rank.returncode for rank in ranks] == [1, 1], shown
    for own, other, address in ((0, 1, "10.213.77.2"), (1, 0, "10.213.77.1")):
        line = error_line(shown[own])
        lost = f"rank {other} (process {ranks[other].pid} on node{other + 1}) is cut off, {address}"
        assert f"no progress for {STALL} s (`watch_stall_seconds`) on rank {own}" in line
        assert f"{lost} does not answer node{own + 1} (" in line and "Traceback" not in shown[own]
    kept = [json.loads(f.read_text()) for f in (folder / evidence.FOLDER).iterdir()]
    assert {row["rank"] for row in kept} == {0, 1} and all("stack" in row for row in kept)
    saved = int((folder / "latest").read_text().removeprefix("global_step"))
    assert 10 <= saved < 120

    nodes.link("up")
    go_on_with_another_clock(nodes, file, folder, tmp_path, saved)
    assert tools.losses(folder) == tools.losses(one_host)
    for key in ("iteration", "learning_rate", "consumed_sha"):
        assert [r[key] for r in tools.log(folder)] == [r[key] for r in tools.log(one_host)]
    tools.assert_same(tools.weights(folder), tools.weights(one_host))


CLOCK = """
import time
_real = time.time
time.time = lambda: _real() - 86400.0
time.time_ns = lambda: int(_real() * 1e9) - 86400 * 10**9
"""


def go_on_with_another_clock(nodes, file: str, folder: Path, tmp_path: Path, saved: int) -> None:
    """The same commands; node2's clock is a day behind, and both fall asleep for a while."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK)
    first = nodes.start(0, sys.executable, "train.py", file)
    second = nodes.start(1, sys.executable, "train.py", file, PYTHONPATH=str(tmp_path / "clock"))
    wait_for_step(folder, saved + 5, first, second)
    second.send_signal(signal.SIGSTOP)  # one: several turns of the watchdog, less than its patience
    time.sleep(STALL / 2)
    second.send_signal(signal.SIGCONT)
    wait_for_step(folder, saved + 10, first, second)
    for asleep in (first, second):  # all: longer than its patience, which does not count
        asleep.send_signal(signal.SIGSTOP)
    time.sleep(STALL + 2)
    for asleep in (first, second):
        asleep.send_signal(signal.SIGCONT)
    shown = [rank.communicate(timeout=LONG)[1] for rank in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], shown
    assert f"continues at iteration {saved}" in shown[0]


def test_a_folder_that_the_hosts_do_not_share(text, tmp_path, nodes):
    """node2 has an empty file system where node1 has the run's folder."""
    (tmp_path / "runs").mkdir()
    file = write(tmp_path / "run.yml", text, tmp_path / "runs" / "run")
    command = (sys.executable, "train.py", file)
    first = nodes.start(0, *command)
    second = nodes.start(1, *command, mount=str(tmp_path / "runs"))
    shown = [rank.communicate(timeout=LONG)[1] for rank in (first, second)]
    assert [first.returncode, second.returncode] == [2, 2], shown
    line = error_line(shown[0])
    assert f"node2: {tmp_path / 'runs' / 'run'} is not the folder that rank 0 on node1" in line
    assert "set `save` to a folder on a file system that all hosts share" in line
    assert not list((tmp_path / "runs" / "run").iterdir())  # nothing was begun, nothing is left


SSH = """#!/bin/sh
# For ssh: addresses are names of network namespaces, and every one of them lets us in.
while [ "${{1#-}}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
case $1 in
    {first}) node={node1}; name=node1 ;;
    {second}) node={node2}; name=node2 ;;
    *) echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255 ;;
esac
shift
exec ip netns exec $node unshare --uts sh -c "hostname $name; $*"
"""


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh not installed (Debian: pdsh)")
def test_a_hostfile_with_two_hosts(text, tmp_path, nodes, one_host):
    """deepy.py, DeepSpeed's runner and the real pdsh; only ssh is a stand-in."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    first, second = standalone_nodes.ADDRESSES
    names = {"node1": nodes.names[0], "node2": nodes.names[1]}
    ssh.write_text(SSH.format(first=first, second=second, **names))
    ssh.chmod(0o755)
    hosts = tmp_path / "hosts"
    file = write(tmp_path / "run.yml", text, tmp_path / "run")

    def launch(*listed: str) -> subprocess.CompletedProcess[str]:
        hosts.write_text("".join(f"{host} slots=1\n" for host in listed))
        settings = ["--set", f"hostfile={hosts}", "--set", "launcher=pdsh"]
        return subprocess.run(
            [sys.executable, "deepy.py", "train.py", file, *settings],
            cwd=tools.ROOT,
            env=launching.environment(PATH=f"{ssh.parent}:{os.environ['PATH']}"),
            capture_output=True,
            text=True,
            timeout=240,
        )

    absent = launch(first, "10.213.77.9")
    assert absent.returncode == 1 and not (tmp_path / "run" / "log.jsonl").exists()
    line = error_line(absent.stderr)
    assert "no process was started: host 10.213.77.9 cannot be reached by ssh" in line
    assert "Connection refused" in line and first not in line and "Traceback" not in absent.stderr

    done = launch(first, second)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tools.losses(tmp_path / "run") == tools.losses(one_host)
