"""How a position method meets a softmax: one contract, `attend`, and its implementations."""

from megatron_patches.attention.api import attend
from megatron_patches.attention.selection import IMPLEMENTATIONS, preferences

__all__ = ["IMPLEMENTATIONS", "attend", "preferences"]
