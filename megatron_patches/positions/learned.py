"""Learned absolute positions: x + weight[p]. Cannot read beyond its table.

Radford et al. (GPT) and Devlin et al. (arXiv 1810.04805), section 3.2; as in GPT-NeoX.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import finite


class Learned(PositionMethod):
    """`weight` [max_length, C], drawn from N(0, init_method_std^2).

    Options: `init_method_std` (>= 0). Raises ValueError if `max_length` is None.
    """

    place = "embedding"
    module_name = "position_embeddings"

    def __init__(self, geometry: Geometry, *, init_method_std: float = 0.02, **common: Any) -> None:
        super().__init__(geometry, **common)
        if geometry.max_length is None:
            raise ValueError("learned needs max_length, the number of rows of its table")
        if finite(self.name, "init_method_std", init_method_std) < 0:
            raise ValueError(f"learned: init_method_std={init_method_std} is negative")
        self.max_length = geometry.max_length
        generator = torch.Generator().manual_seed(geometry.seed)
        size = (self.max_length, geometry.hidden_size)
        draw = torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
        self.own("weight", (draw * init_method_std).to(torch.get_default_device()))
        self.head_dim_of["weight"] = None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, L, C] plus the rows of `positions` ([L] or [B, L]): shape and dtype of x.

        Raises:
            ValueError: more tokens than rows; on a CPU also a position outside the table. On a GPU
                the positions are not read back: ask `can_read` with the total length first.
        """
        self.can_read(x.shape[-2])
        if positions.device.type == "cpu":
            self.can_read(int(positions.max()) + 1)
        return x + F.embedding(positions, self.get_parameter("weight")).to(x.dtype)
