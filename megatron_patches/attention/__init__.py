"""How a position method meets a softmax: one contract, `attend`, and its implementations."""

from megatron_patches.attention.api import IMPLEMENTATIONS, attend, choose

__all__ = ["IMPLEMENTATIONS", "attend", "choose"]
