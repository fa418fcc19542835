"""GPT-NeoX on a machine without a GPU: what it asks of `torch.cuda`, answered for the CPU.

NeoX has no switch for this. Each replacement stands for one thing that stops it there; all are undone
together. `torch.cuda.is_available` stays as it is: torch and DeepSpeed look at it as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.neox.patches import Patches

TENSORS = ("Long", "Byte", "Float", "Half", "Int", "Double", "Bool")


def wanted() -> bool:
    """DeepSpeed's own switch decides: the launcher sets it where there is no GPU, or gloo is asked."""
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def processes() -> int:
    """How many processes stand for GPUs on this host; DeepSpeed's launcher tells its workers."""
    return int(os.environ.get("LOCAL_SIZE", "1"))


def before(patches: Patches) -> None:
    """What must be in place before NeoX is imported, in the launcher and in every worker."""
    cuda = torch.cuda
    cpu = torch.device("cpu")
    patches.set(cuda, "device_count", processes)
    patches.set(cuda, "current_device", lambda: cpu)
    patches.set(cuda, "set_device", _nothing())
    patches.set(cuda, "synchronize", _nothing())
    for kind in TENSORS:
        patches.set(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    patches.set(torch.Tensor, "cuda", _itself)
    patches.set(torch.nn.Module, "cuda", _itself)
    patches.set(cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    patches.set(cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state.cpu()))


def after(patches: Patches) -> None:
    """What needs NeoX's modules, in a worker."""
    from megatron import initialize

    patches.wrap(initialize, "initialize_megatron", _allow_no_cuda)
    _no_compilation(patches)


def _nothing() -> Callable[..., None]:
    """A new function each time: torch's compiler refuses one function under two names."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return nothing


def _itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_megatron(neox_args: Any, allow_no_cuda: bool = True) -> Any:
        return original(neox_args, allow_no_cuda=True)

    return initialize_megatron


def _no_compilation(patches: Patches) -> None:
    """DeepSpeed would compile its Adam and a shared-memory all-reduce for minutes at first use.

    torch's AdamW computes the same update, gloo the same sum.
    """
    import deepspeed.comm.torch  # noqa: F401  (its attribute `torch` is torch itself)
    import deepspeed.ops.adam as adam

    def fused_adam(
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> torch.optim.Optimizer:
        groups = list(params)
        return torch.optim.AdamW(
            groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay
        )

    patches.set(adam, "FusedAdam", fused_adam)
    module = sys.modules["deepspeed.comm.torch"]
    if hasattr(module, "build_shm_op"):
        patches.set(module, "build_shm_op", lambda: None)
