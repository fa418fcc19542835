"""Processes and devices: one process, torchrun's, DeepSpeed's or Slurm's, on GPUs or on the CPU."""

from __future__ import annotations

import logging
import os
import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron_patches.config import Config


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    device: torch.device

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


def use_cpu(config: Config) -> bool:
    """gloo asks for the CPU, nccl for GPUs; otherwise a GPU is used where there is one."""
    if config.distributed_backend == "gloo":
        return True
    if not torch.cuda.is_available():
        if config.distributed_backend == "nccl":
            raise RuntimeError(
                f"{config.place('distributed_backend')} asks for nccl, but torch sees no GPU here; "
                "add configs/cluster/cpu.yml, or run where there is one"
            )
        return True
    return False


def start(config: Config) -> World:
    """Join the process group with what the launcher set in the environment; alone without one.

    Raises RuntimeError when the backend does not fit the machine.
    """
    cpu = use_cpu(config)
    if cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed looks for devices
    deepspeed = import_deepspeed()
    env = os.environ
    if "RANK" not in env and int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
        _join_slurm(config)
    if "RANK" not in env:
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        env["MASTER_PORT"] = "0"  # alone: the store takes a free port itself, without a race
    local_rank = int(env.get("LOCAL_RANK", "0"))
    if cpu:
        if "OMP_NUM_THREADS" not in env:
            # Two ranks with two threads each on two cores spend their time waiting for each other.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
            ranks = int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]))
            torch.set_num_threads(max(1, cores // ranks))
        device = torch.device("cpu")
    else:
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    backend = config.distributed_backend or ("gloo" if cpu else "nccl")
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, verbose=False, init_method="env://"
        )
    return World(int(env["RANK"]), int(env["WORLD_SIZE"]), local_rank, device)


def _join_slurm(config: Config) -> None:
    """Under `srun` every task finds its place in Slurm's variables."""
    env = os.environ
    if "MASTER_ADDR" not in env:
        if int(env.get("SLURM_NNODES", "1")) > 1:
            raise RuntimeError(
                "several Slurm nodes, and MASTER_ADDR is not set: before srun, run "
                'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            )
        env["MASTER_ADDR"] = "127.0.0.1"
    env.setdefault("MASTER_PORT", str(config.master_port))
    env.update(
        RANK=env["SLURM_PROCID"],
        WORLD_SIZE=env["SLURM_NTASKS"],
        LOCAL_RANK=env.get("SLURM_LOCALID", "0"),
    )


def finish() -> None:
    """Leave the process group; once, at the end of a worker."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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
