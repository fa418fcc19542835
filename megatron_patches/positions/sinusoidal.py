"""Sinusoidal embedding: x + [sin(p * f), cos(p * f)], f_i = 10000^(-2i / C).

Vaswani et al.: Attention Is All You Need (arXiv 1706.03762), section 3.5; all sines, then all
cosines, unscaled, as in GPT-NeoX.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry


class Sinusoidal(PositionMethod):
    """Saves the buffer `inv_freq` [C / 2], fp32; learns nothing. C must be even."""

    place = "embedding"
    module_name = "position_embeddings"
    inv_freq: Tensor

    def __init__(self, geometry: Geometry, **common: Any) -> None:
        super().__init__(geometry, **common)
        width = geometry.hidden_size
        if width % 2:
            raise ValueError(f"sinusoidal needs an even hidden_size, not {width}")
        steps = torch.arange(0, width, 2, dtype=torch.float32) / width
        self.register_buffer("inv_freq", 1.0 / 10000.0**steps)
        self.head_dim_of["inv_freq"] = None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, L, C] plus the embeddings of `positions` ([L] or [B, L]): shape and dtype of x."""
        frequency = self.inv_freq
        angle = positions.to(frequency)[..., None] * frequency
        return x + torch.cat((angle.sin(), angle.cos()), dim=-1).to(x.dtype)
