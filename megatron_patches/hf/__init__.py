"""Models carried to Hugging Face's transformers and back; position methods in other people's models.

`use_positions` needs torch and transformers; the rest also what training needs (the extras `train` and `hf`).
Everything loads on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patches.hf.carrying import carry
    from megatron_patches.hf.foreign_models import load_with_positions, use_positions
    from megatron_patches.hf.harness import register
    from megatron_patches.hf.reading import read_model

__all__ = ["carry", "load_with_positions", "read_model", "register", "use_positions"]

_HOMES = {
    "carry": "carrying",
    "load_with_positions": "foreign_models",
    "read_model": "reading",
    "register": "harness",
    "use_positions": "foreign_models",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
