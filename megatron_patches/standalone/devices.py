"""CPU or GPU? Asked by the launcher as well, which needs no torch where the configuration says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_patches.config import Config


def use_cpu(config: Config) -> bool:
    """gloo asks for the CPU, nccl for GPUs; otherwise a GPU is used where there is one.

    Raises RuntimeError for nccl on a machine without a GPU.
    """
    if config.distributed_backend == "gloo":
        return True
    import torch

    if not torch.cuda.is_available():
        if config.distributed_backend == "nccl":
            raise RuntimeError(
                f"{config.place('distributed_backend')} asks for nccl, but torch sees no GPU here; "
                "add configs/cluster/cpu.yml, or run where there is one"
            )
        return True
    return False
