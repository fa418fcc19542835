"""The hosts of a run: DeepSpeed's hostfile, read strictly.

DeepSpeed itself trains on this host alone when the file does not exist, and starts more processes than
a host has slots when asked to.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_patches.config import Config, ConfigError
from megatron_patches.standalone.placement import counts

LARGEST = 1 << 20  # bytes
# The name becomes an argument of ssh, which reads what begins with a dash as an option.
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")
SSH_SECONDS = 10
SIDE_BY_SIDE = 32
PROGRAMS = {"pdsh": "pdsh", "openmpi": "mpirun", "mpich": "mpirun", "slurm": "srun"}


def read_hostfile(config: Config) -> dict[str, int] | None:
    """Host -> slots; None: no hostfile, this host alone or Slurm's.

    Raises ConfigError, with file and line, for what is no `HOST slots=N`, a host twice, fewer slots than
    `num_gpus`, a host that cannot be found, or a launcher that is not installed.
    """
    for key in ("include", "exclude"):
        if getattr(config, key) is not None:
            raise ConfigError(f"{config.place(key)}: list the hosts that shall run in a `hostfile`")
    if config.hostfile is None:
        if config.num_nodes > 1:
            raise ConfigError(f"{config.place('num_nodes')} {config.num_nodes} needs a `hostfile`")
        return None
    path = Path(config.hostfile)
    if not path.is_file():
        raise ConfigError(f"{config.place('hostfile')}: {path} does not exist")
    hosts = _parsed(path, config)
    if config.num_nodes not in (-1, len(hosts)):
        raise ConfigError(
            f"{config.place('num_nodes')} {config.num_nodes}, but {path} lists {len(hosts)} hosts"
        )
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise ConfigError(f"{path}: host {host!r} cannot be found ({error})") from error
    program = PROGRAMS.get(config.launcher)
    if program is not None and [*hosts] != ["localhost"] and shutil.which(program) is None:
        raise ConfigError(
            f"{config.place('launcher')} {config.launcher}: {program} is not installed here, and "
            f"starts the processes on {', '.join([*hosts][:4])}"
        )
    return hosts


def _parsed(path: Path, config: Config) -> dict[str, int]:
    if path.stat().st_size > LARGEST:
        raise ConfigError(f"{path}: larger than {LARGEST:,} bytes, no hostfile")
    hosts: dict[str, int] = {}
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = re.fullmatch(r"slots=([1-9][0-9]{0,4})", (*words, "")[1], re.ASCII)
        if len(words) != 2 or not slots or not HOST.fullmatch(words[0]) or words[0] in hosts:
            raise ConfigError(
                f"{path}:{number}: expected `HOST slots=N`, each host once: {line[:100]!r}"
            )
        hosts[words[0]] = int(slots[1])
        if config.num_gpus is not None and config.num_gpus > hosts[words[0]]:
            raise ConfigError(
                f"{path}:{number}: {words[0]} has slots={slots[1]}, fewer than "
                f"{config.place('num_gpus')} {config.num_gpus} that each host shall run"
            )
    if not hosts:
        raise ConfigError(f"{path}: names no hosts")
    return hosts


def reach(hosts: Iterable[str]) -> None:
    """Log in to every host once, side by side; DeepSpeed tries the first one, and shows a traceback.

    Raises RuntimeError that names the hosts where that fails.
    """
    if shutil.which("ssh") is None:
        raise RuntimeError("ssh is not installed here, and starts the processes on other hosts")
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        faults = [fault for fault in pool.map(_login, hosts) if fault]
    if faults:
        raise RuntimeError(
            f"no process was started: {'; '.join(faults[:4])}"
            + (f"; and {len(faults) - 4} more hosts" if len(faults) > 4 else "")
            + ". ssh must get there without a password; `no_ssh_check: true` leaves this test out, and "
            "torchrun or srun with train.py need no ssh"
        )


def _login(host: str) -> str:
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_SECONDS}", host, "true"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * SSH_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"host {host} does not answer ssh for {2 * SSH_SECONDS} s"
    said = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    return f"host {host} cannot be reached by ssh ({said[:200]})" if done.returncode else ""


def refuse_inside_a_launcher() -> None:
    """deepy.py is started once; each of several would start all the processes again.

    Raises ConfigError inside torchrun, mpirun or srun with more than one process.
    """
    for launcher, processes in counts(os.environ).items():
        if processes > 1:
            raise ConfigError(
                f"{launcher} started {processes} processes of deepy.py, each of which would start all "
                "of the run: put train.py and the configuration files in place of deepy.py"
            )
