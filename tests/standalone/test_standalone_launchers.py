"""Which rank a process is under each launcher, and the real launchers themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import standalone_launching as launching
import standalone_tools as tools
import torch
import yaml

from megatron_patches.config import ConfigError
from megatron_patches.standalone import runtime
from megatron_patches.standalone.placement import Placement, placement, slurm_hosts
from megatron_patches.standalone.signals import INTERRUPTED
from megatron_patches.standalone.train import train

# ---- the variables of each launcher, as the programs themselves set them -------------------------

TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "node1", "MASTER_PORT": "40001", "TORCHELASTIC_RUN_ID": "none"},
}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# A batch script has these, too, and is no task of the run.
ALLOCATION = {
    **{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "0"},
    **{"SLURM_JOB_NODELIST": "gpu[08-09]", "SLURM_LOCALID": "0"},
}
STEP = {
    **ALLOCATION,
    **{
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
    },
    **{"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[08-09]"},
    **{"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"},
}
ONE_NODE = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu08"}
NO_LIST = {k: v for k, v in STEP.items() if not k.endswith("NODELIST")}
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "11"}
EXPLICIT = "RANK/WORLD_SIZE"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Placement("")),
        (ALLOCATION, Placement("")),
        (TORCHRUN, Placement(EXPLICIT, 3, 4, 1, "node1", 40001)),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, Placement(EXPLICIT)),
        (OPEN_MPI, Placement("Open MPI", 1, 2, 1, "127.0.0.1", 29500)),
        ({**OPEN_MPI, "MASTER_ADDR": "a"}, Placement("Open MPI", 1, 2, 1, "a", 29500)),
        (HYDRA, Placement("mpiexec", 1, 2, 1, "127.0.0.1", 29500)),
        (STEP, Placement("srun", 3, 4, 1, "gpu08", 29500)),
        ({**STEP, "MASTER_PORT": "7"}, Placement("srun", 3, 4, 1, "gpu08", 7)),
        (ONE_NODE, Placement("srun", 3, 4, 1, "127.0.0.1", 29500)),
        (NO_LIST, Placement("srun", 3, 4, 1, "10.0.0.1", 29500)),
        ({**STEP, **PMI2}, Placement("srun", 3, 4, 1, "gpu08", 29500)),
        # One inside another: the inner one counts.
        ({**STEP, **TORCHRUN}, Placement(EXPLICIT, 3, 4, 1, "node1", 40001)),
        (
            {**STEP, **TORCHRUN, "WORLD_SIZE": "16", "RANK": "12"},
            Placement(EXPLICIT, 12, 16, 1, "node1", 40001),
        ),
        (
            {**ONE_NODE, **OPEN_MPI, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            Placement("Open MPI", 1, 2, 1, "127.0.0.1", 29500),
        ),
        (
            {**ONE_NODE, **HYDRA, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            Placement("mpiexec", 1, 2, 1, "127.0.0.1", 29500),
        ),
    ],
)
def test_the_place_of_a_process(env, expected):
    assert placement(env, 29500) == expected


def without(env: dict[str, str], key: str) -> dict[str, str]:
    return {k: v for k, v in env.items() if k != key}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        (without(TORCHRUN, "LOCAL_RANK"), "RANK is set, but not LOCAL_RANK"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR, the host of rank 0, is not set: export"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not a number"),
        ({**TORCHRUN, "RANK": "\u0663x"}, "is not a number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a number"),
        # RANK=0 of an earlier session, exported into a batch script: eight runs of one process each.
        (
            {**STEP, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            "RANK/WORLD_SIZE says 1 process.*srun started 4.*Unset RANK and WORLD_SIZE",
        ),
        ({**STEP, **OPEN_MPI}, "Open MPI says 2 process.*but srun started 4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun -x MASTER_ADDR=HOST"),
        ({**HYDRA, "PMI_SIZE": "4"}, "mpiexec -genv MASTER_ADDR HOST"),
        (without(HYDRA, "MPI_LOCALRANKID"), "PMI_RANK is set, but not MPI_LOCALRANKID"),
        (without(NO_LIST, "SLURM_LAUNCH_NODE_IPADDR"), "neither SLURM_STEP_NODELIST nor"),
    ],
)
def test_contradictions_are_refused_by_name(env, message):
    with pytest.raises(ConfigError, match=message):
        placement(env, 29500)


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("node1", ["node1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,4-5],gpu-a", ["n1", "n4", "n5", "gpu-a"]),
        ("r[1-2]n[01-02]x", ["r1n01x", "r1n02x", "r2n01x", "r2n02x"]),
        ("a.b-c,d[7]", ["a.b-c", "d7"]),
    ],
)
def test_lists_of_slurm_nodes(listed, hosts):
    assert slurm_hosts(listed) == hosts
    if shutil.which("scontrol"):
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            env=launching.environment(SLURM_CONF=os.devnull),
            capture_output=True,
            text=True,
        )
        assert shown.stdout.split() in (hosts, [])  # empty: this scontrol wants a configuration


@pytest.mark.parametrize(
    "listed", ["", "n[1", "n1]", "n[3-1]", "n[]", "n[a-b]", "a,,b", "n[1-2-3]"]
)
def test_what_is_no_list_of_nodes(listed):
    with pytest.raises(ConfigError, match="is not a"):
        slurm_hosts(listed)


@pytest.mark.parametrize("listed", ["n[0-999999999]", "n[0-999][0-999]"])
def test_a_list_that_is_a_bomb(listed):
    with pytest.raises(ConfigError, match="names more than 65536 nodes"):
        slurm_hosts(listed)


def test_a_task_that_sees_its_own_gpu_alone(monkeypatch):
    """Slurm's --gpus-per-task numbers the GPU of each task 0."""
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for here, local_rank, index in ((1, 0, 0), (1, 3, 0), (4, 3, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda here=here: here)
        place = Placement("srun", local_rank=local_rank)
        assert runtime._gpu(place) == torch.device("cuda", index) == taken[-1]
    with pytest.raises(RuntimeError, match=r"rank 4 of this host, which has 4 GPU\(s\)"):
        runtime._gpu(Placement("srun", local_rank=4))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match=r"rank 1 of this host, which has 1 GPU\(s\)"):
        runtime._gpu(Placement("RANK/WORLD_SIZE", local_rank=1))  # not two ranks on one GPU


# ---- the real programs -----------------------------------------------------------------------


@pytest.fixture
def file(text, tmp_path):
    """file(name, **changes) -> the YAML file of a run of two ranks in `tmp_path / name`."""

    def make(name: str, **changes: object) -> str:
        path = tmp_path / f"{name}.yml"
        changes = {"train_micro_batch_size_per_gpu": 2, **changes}
        path.write_text(yaml.safe_dump(tools.settings(text, tmp_path / name, **changes)))
        return str(path)

    return make


def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=tools.ROOT, env=env, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def two_ranks(text, tmp_path_factory) -> list[float]:
    """The losses of two ranks that DeepSpeed's launcher started."""
    folder = tmp_path_factory.mktemp("deepspeed")
    path = folder / "run.yml"
    settings = tools.settings(text, folder / "run", train_micro_batch_size_per_gpu=2)
    path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "deepy.py", "train.py", str(path), "--set", "num_gpus=2"]
    done = run(command, launching.environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return tools.losses(folder / "run")


def torchrun(program: str, path: str, restarts: int) -> list[str]:
    """What two agents of one process each said, as on two hosts that meet by torchrun's rendezvous."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc_per_node", "1", "--max_restarts", str(restarts), "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", f"127.0.0.1:{launching.free_port()}"]
    command += ["--rdzv_id", "toy", "--local_addr", "127.0.0.1", program, path]
    # With the handler a process that C++ aborts shows what its Python threads were doing.
    options = {"cwd": tools.ROOT, "env": launching.environment(PYTHONFAULTHANDLER="1")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, **options, **pipes) for _ in range(2)]
    said = [agent.communicate(timeout=240)[0] for agent in agents]
    codes = [agent.returncode for agent in agents]
    if codes != [0, 0]:
        pytest.fail(f"exit codes {codes}\n" + "\n---- the other agent ----\n".join(said))
    return said


def test_torchrun_with_two_agents(file, tmp_path, two_ranks):
    """With one restart, as a user would give: once in some 300 starts torch's C++ aborted a process."""
    said = torchrun("train.py", file("torchrun", checkpoint_factor=2), restarts=1)
    if "exitcode: -6" in "".join(said):
        print("\n---- the other agent ----\n".join(said), file=sys.__stderr__)
    assert tools.losses(tmp_path / "torchrun") == two_ranks


def test_torchrun_starts_an_aborted_rank_again(file, tmp_path, two_ranks):
    """Both agents start their processes anew, which go on from the last checkpoint."""
    worker = "tests/standalone/standalone_abort_once.py"
    said = torchrun(worker, file("again", checkpoint_factor=2), restarts=1)
    assert "exitcode: -6" in "".join(said)
    assert "continues at iteration 2" in "".join(said)
    assert tools.losses(tmp_path / "again") == two_ranks


@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun not installed (Debian: openmpi-bin)"
)
def test_open_mpi(file, tmp_path, two_ranks):
    env = launching.environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    port = ["--set", f"master_port={launching.free_port()}"]
    command = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "train.py"]
    done = run([*command, file("mpi"), *port], env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 process(es)" in done.stderr
    assert tools.losses(tmp_path / "mpi") == two_ranks


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := launching.why_no_slurm():
        pytest.skip(reason)
    with launching.slurm(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def test_slurm_asks_to_save(file, config, tmp_path, slurm):
    """scancel -s USR1, as --signal=USR1@ sends it: saved, code 75; the same command goes on."""
    changes = {"train_iters": 250, "checkpoint_factor": 250}
    folder = tmp_path / "asked"
    command = ["srun", "-n", "2", "-J", "asked", sys.executable, "train.py"]
    command += [file("asked", **changes), "--set", f"master_port={launching.free_port()}"]
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, cwd=tools.ROOT, env=slurm, **output)
    end = time.monotonic() + 120
    while not (folder / "log.jsonl").is_file() or len(tools.log(folder)) < 5:
        assert first.poll() is None and time.monotonic() < end, first.stderr.read()
        time.sleep(0.05)
    run(["scancel", "--signal=USR1", "--name=asked"], slurm)
    _, shown = first.communicate(timeout=120)
    assert first.returncode == INTERRUPTED, shown
    assert "interrupted: " in shown and "the same command continues" in shown
    saved = int((folder / "latest").read_text().removeprefix("global_step"))
    assert 5 <= saved == tools.log(folder)[-1]["iteration"] < 250
    second = run(command, slurm)
    assert second.returncode == 0, second.stderr[-3000:]
    assert f"continues at iteration {saved}" in second.stderr
    # One process computes the same up to the order of sums.
    straight = train(config("straight", **changes, train_micro_batch_size_per_gpu=4))
    assert tools.losses(folder) == pytest.approx(tools.losses(straight), rel=1e-4)


def test_deepy_inside_a_launcher_is_refused(file, monkeypatch, capsys):
    """`srun python deepy.py`: every task would start all the tasks."""
    import deepy

    for key, value in STEP.items():
        monkeypatch.setenv(key, value)
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    assert deepy.main(["train.py", file("nested")]) == 2
    assert "srun started 4 processes of deepy.py" in capsys.readouterr().err
    assert not Path(file("nested")).with_suffix("").exists()
