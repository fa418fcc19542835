"""The built-in engine: a GPT in GPT-NeoX's parameter layout, trained with DeepSpeed, without NeoX."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patches.standalone.checkpoint import CheckpointError, load_model
    from megatron_patches.standalone.model import GPT
    from megatron_patches.standalone.shape import ModelShape

__all__ = ["GPT", "CheckpointError", "ModelShape", "load_model"]

# Loaded on first use: the workers must set the environment of OpenMP before torch is imported.
_HOMES = {
    "CheckpointError": "checkpoint",
    "GPT": "model",
    "ModelShape": "shape",
    "load_model": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
