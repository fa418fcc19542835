"""Real launchers for the tests: a Slurm of one host, ports, and what a child process needs to know."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import standalone_tools as tools

# What the launchers set, and what would make a child believe that one of them had started it.
PREFIXES = ("SLURM", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "GLOO_", "NCCL_")


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in tools.clean_environment().items() if not k.startswith(PREFIXES)}
    return {**kept, **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def why_no_slurm() -> str | None:
    """None where a Slurm can be started: its programs are installed, and we are root."""
    missing = [
        name for name in ("slurmctld", "slurmd", "srun", "scancel") if not shutil.which(name)
    ]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm)"
    return None if os.geteuid() == 0 else "starting a Slurm daemon takes root"


SLURM = """ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/daemon.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/daemon.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm of this one host, without authentication; the environment for its clients."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    file = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    ports = {"controller": free_port(), "daemon": free_port()}
    file.write_text(SLURM.format(host=host, folder=folder, **ports))
    env = environment(SLURM_CONF=str(file))
    daemons = []
    try:
        with open(folder / "daemons.out", "w") as out:
            for program in ("slurmctld", "slurmd"):
                command = [program, "-D", "-f", str(file)]
                daemons.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
        end = time.monotonic() + 60
        while "idle" not in _nodes(env):
            assert time.monotonic() < end, (folder / "controller.log").read_text()[-2000:]
            time.sleep(0.2)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def _nodes(env: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "-o", "%t"]
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout
