"""The places of DeepSpeed that the patches rely on, compared before anything is replaced."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from megatron_patches.neox.seams import MovedSeam

# Module, dotted name, a piece of its source.
PLACES = (
    ("runtime.engine", "DeepSpeedEngine.clip_fp32_gradients", "clip_grad_norm_("),
    ("runtime.engine", "DeepSpeedEngine._take_model_step", "clip_fp32_gradients()"),
    ("runtime.engine", "DeepSpeedEngine.get_global_grad_norm", "_global_grad_norm"),
    ("runtime.engine", "DeepSpeedEngine._configure_distributed_model", "set_deepspeed_parallelism"),
    (
        "runtime.pipe.engine",
        "PipelineEngine._exec_reduce_tied_grads",
        "get_tied_weights_and_groups",
    ),
    ("runtime.pipe.module", "PipelineModule.get_tied_weights_and_groups", ""),
    ("runtime.zero.partition_parameters", "shutdown_init_context", ""),
    ("runtime.zero.partition_parameters", "restore_init_context", ""),
    ("launcher.runner", "EXPORT_ENVS", None),
)


def check() -> None:
    """Raises MovedSeam that names what this DeepSpeed does not have."""
    import deepspeed

    moved = [line for place in PLACES if (line := _differs(*place)) is not None]
    if moved:
        raise MovedSeam(
            f"DeepSpeed {deepspeed.__version__} does not fit the patches: {'; '.join(moved)}; "
            "they are known to fit 0.19.8"
        )


def _differs(module: str, name: str, piece: str | None) -> str | None:
    place = f"deepspeed.{module}.{name}"
    found: Any = importlib.import_module(f"deepspeed.{module}")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        return f"{place} is gone"
    if piece is not None and piece not in inspect.getsource(found):
        return f"{place} no longer contains `{piece}`"
    return None
