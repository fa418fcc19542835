"""Processes and devices: one process or those of any launcher, on GPUs or on the CPU."""

from __future__ import annotations

import logging
import os
import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_patches.standalone.devices import use_cpu

if TYPE_CHECKING:
    from megatron_patches.config import Config
    from megatron_patches.standalone.links import Links
    from megatron_patches.standalone.placement import Placement
    from megatron_patches.standalone.rendezvous import Meeting


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    device: torch.device
    links: Links | None = None  # to other hosts; None: alone

    @property
    def first(self) -> bool:
        return self.rank == 0

    def machine(self) -> dict[str, str]:
        """`machine`: the class of machine that trains, without anything that names this one."""
        processes = f"{self.size} process" + ("es" if self.size > 1 else "")
        if self.device.type == "cuda":
            return {"machine": f"{torch.cuda.get_device_name(self.device)}, {processes}"}
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = f"{torch.get_num_threads()} thread" + ("s" if torch.get_num_threads() > 1 else "")
        return {"machine": f"{_processor()}, {cores} cores, {processes} of {threads}"}


def _processor() -> str:
    """The name of the CPU's model."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = [
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            ]
    except OSError:  # not Linux
        found = []
    return next(iter(found), "") or platform.processor() or platform.machine() or "unknown CPU"


def start(config: Config) -> World:
    """Join the process group with what the launcher set in the environment; alone without one.

    docs/reliability.md lists the launchers. Raises RuntimeError when the backend does not fit the
    machine, and what `placement` and `rendezvous.meet` raise.
    """
    from megatron_patches.standalone.placement import placement

    cpu = use_cpu(config)
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed looks for devices
    given = {"MASTER_ADDR": config.master_addr} if config.master_addr else {}
    place = placement({**given, **os.environ}, config.master_port)
    # What is below, and DeepSpeed, reads these, whatever the launcher calls them.
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.size))
    os.environ.update(LOCAL_RANK=str(place.local_rank))
    deepspeed = import_deepspeed()
    device = torch.device("cpu") if cpu else _gpu(place)
    backend = config.distributed_backend or ("gloo" if cpu else "nccl")
    if not torch.distributed.is_initialized():
        _join(config, place, backend, device)
    if cpu and "OMP_NUM_THREADS" not in os.environ:
        # Two ranks with two threads each on two cores spend their time waiting for each other.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        torch.set_num_threads(max(1, cores // _sharing()))
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    links = _meeting.links if _meeting is not None else None
    return World(place.rank, place.size, place.local_rank, device, links)


_meeting: Meeting | None = None  # of the process group, which outlives a run in tests


def _join(config: Config, place: Placement, backend: str, device: torch.device) -> None:
    """Make the process group; alone it needs neither a port nor a network."""
    global _meeting
    from deepspeed.constants import default_pg_timeout

    from megatron_patches.standalone.rendezvous import meet

    _meeting = meet(config, place, backend) if place.size > 1 else None

    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.HashStore() if _meeting is None else _meeting.store,
        rank=place.rank,
        world_size=place.size,
        timeout=default_pg_timeout,
        device_id=device if device.type == "cuda" and place.size > 1 else None,
    )


def _sharing() -> int:
    """Ranks that share this one's cores."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return _meeting.sharing if _meeting is not None else 1


def _gpu(place: Placement) -> torch.device:
    """The GPU of this rank; Slurm's --gpus-per-task shows each task its own alone, as number 0."""
    here, number = torch.cuda.device_count(), place.local_rank
    if number >= here and not (here == 1 and place.launcher == "srun"):
        raise RuntimeError(
            f"rank {number} of this host, which has {here} GPU(s): start as many processes a host"
        )
    device = torch.device("cuda", number if number < here else 0)
    torch.cuda.set_device(device)
    return device


def finish() -> None:
    """Leave the process group; once, at the end of a worker, before `leaving.leave`."""
    global _meeting
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if _meeting is not None:
        _meeting.links.close()
    _meeting = None


def import_deepspeed() -> Any:
    """DeepSpeed without its chatter, and without compiling what the CPU does not need."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # On the CPU DeepSpeed compiles a shared-memory all-reduce for a minute at first use; gloo does
    # the same work. `deepspeed.comm.torch` as an attribute is torch itself, hence sys.modules.
    module = sys.modules.get("deepspeed.comm.torch")
    if module is not None and hasattr(module, "build_shm_op"):
        module.build_shm_op = lambda: None  # type: ignore[attr-defined]
    # Its bfloat16 optimizer prints the memory in use eight times while it is made.
    module = sys.modules.get("deepspeed.runtime.bf16_optimizer")
    if module is not None and hasattr(module, "see_memory_usage"):
        module.see_memory_usage = lambda *_, **__: None  # type: ignore[attr-defined]
    return deepspeed
