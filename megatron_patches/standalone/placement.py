"""Which process of a run this one is, read from the variables of whatever launcher started it.

| launcher | rank, processes, rank on this host |
|---|---|
| torchrun, DeepSpeed's, by hand | RANK, WORLD_SIZE, LOCAL_RANK |
| Open MPI's mpirun | OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK |
| MPICH's and Intel's mpiexec | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID |
| Slurm's srun | SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID |

The first that is there counts: where launchers are nested (torchrun in srun, mpirun in an allocation) the
inner one comes first. A launcher whose own count exceeds what that one says is a contradiction, which
is refused. Slurm's variables count inside a step of srun alone; a batch script has SLURM_PROCID, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_patches.config import ConfigError

# Name, rank, processes, rank on the host, processes on the host; in the order that counts.
LAUNCHERS = (
    ("RANK/WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        *("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None),
)
MOST_HOSTS = 1 << 16  # in a list of Slurm's: more is a typing error


class PlaceError(ConfigError):
    """What is wrong where this one process runs: it says so itself, whatever its rank is."""


@dataclass(frozen=True)
class Placement:
    """`launcher` is one of `LAUNCHERS`, or "" for a process of its own.

    `address`:`port` is where rank 0 listens, empty and 0 for a process of its own.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0


def counts(env: Mapping[str, str]) -> dict[str, int]:
    """Launcher -> how many processes it says that there are, of those whose variables are set."""
    found = {
        name: _whole(env, size)
        for name, rank, size, *_ in LAUNCHERS
        if rank in env and (size in env or name != "srun")
    }
    # srun --mpi=pmi2 says the same twice, and MPI's variables lack the rank on the host.
    if found.get("mpiexec") == found.get("srun"):
        found.pop("mpiexec", None)
    return found


def placement(env: Mapping[str, str], default_port: int) -> Placement:
    """This process's place in the run.

    Args:
        env: the process's environment.
        default_port: where rank 0 listens, unless MASTER_PORT says otherwise.

    Raises PlaceError when a variable is missing, is no number, or contradicts another.
    """
    found = counts(env)
    if not found:
        return Placement("")
    name, rank_key, size_key, local_key, _ = next(x for x in LAUNCHERS if x[0] in found)
    rank, size = _whole(env, rank_key), found[name]
    if not rank < size:
        raise PlaceError(f"{rank_key}={rank} is not below {size_key}={size}")
    for other, processes in found.items():
        if processes > size:
            raise PlaceError(
                f"{name} says {size} process(es), but {other} started {processes}: each would train "
                f"by itself. Unset {rank_key} and {size_key}, or start one launcher only"
            )
    if size == 1:
        return Placement(name)
    if local_key not in env:
        raise PlaceError(f"{rank_key} is set, but not {local_key}, the rank within this host")
    port = _whole(env, "MASTER_PORT") if "MASTER_PORT" in env else default_port
    if not 0 < port < 65536:
        raise PlaceError(f"MASTER_PORT={port} is not a port (1 to 65535)")
    return Placement(name, rank, size, _whole(env, local_key), _address(env, name, size), port)


def _address(env: Mapping[str, str], name: str, size: int) -> str:
    """MASTER_ADDR, or what the launcher's variables say about where rank 0 is."""
    if address := env.get("MASTER_ADDR"):
        return address
    if name == "srun":
        return _slurm_address(env)
    local = next((x[4] for x in LAUNCHERS if x[0] == name), None)
    if name != "RANK/WORLD_SIZE" and local in env and _whole(env, str(local)) == size:
        return "127.0.0.1"
    example = {
        "Open MPI": "mpirun -x MASTER_ADDR=HOST ...",
        "mpiexec": "mpiexec -genv MASTER_ADDR HOST ...",
    }.get(name, "export MASTER_ADDR=HOST")
    raise PlaceError(
        f"{name} starts {size} processes, and MASTER_ADDR, the host of rank 0, is not set: {example}"
    )


def _slurm_address(env: Mapping[str, str]) -> str:
    """Of the step's nodes the first, where srun puts task 0."""
    nodes = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or ""
    if nodes == "1":
        return "127.0.0.1"
    for key in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(key):
            return slurm_hosts(env[key])[0]
    if address := env.get("SLURM_LAUNCH_NODE_IPADDR"):
        return address
    raise PlaceError(
        "srun started several tasks, but neither SLURM_STEP_NODELIST nor SLURM_LAUNCH_NODE_IPADDR is "
        "set: export MASTER_ADDR=HOST, the host of task 0"
    )


def slurm_hosts(listed: str) -> list[str]:
    """The hosts of Slurm's short form: `a[1-2,07]x,b` is a1x, a2x, a07x, b.

    Raises PlaceError for what is not such a list, or names more than 65536 hosts.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", listed)
    if ",".join(parts) != listed or not parts:
        raise PlaceError(f"{listed!r} is not a list of Slurm's nodes")
    return [host for part in parts for host in _expanded(part, listed)]


def _expanded(part: str, listed: str) -> list[str]:
    hosts = [""]
    for text, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
        choices = [text] if text else [n for r in ranges.split(",") for n in _numbers(r, listed)]
        if len(hosts) * len(choices) > MOST_HOSTS:
            raise PlaceError(f"{listed[:80]!r} names more than {MOST_HOSTS} nodes")
        hosts = [host + choice for host in hosts for choice in choices]
    return hosts


def _numbers(written: str, listed: str) -> list[str]:
    """`07-10` -> 07 08 09 10, as wide as the first one is written."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", written)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if match is None or low > high:
        raise PlaceError(f"{listed[:80]!r}: {written!r} is not a range of node numbers")
    if high - low >= MOST_HOSTS:
        raise PlaceError(f"{listed[:80]!r} names more than {MOST_HOSTS} nodes")
    return [f"{number:0{len(match[1])}d}" for number in range(low, high + 1)]


def _whole(env: Mapping[str, str], key: str) -> int:
    value = env.get(key)
    if value is None:
        raise PlaceError(f"{key} is not set, but the other variables of its launcher are")
    if not re.fullmatch(r"\d{1,9}", value):
        raise PlaceError(f"{key}={value!r} is not a number")
    return int(value)
