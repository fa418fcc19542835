"""Sandwich: H / (8h) * sum over k of [cos(d / 10000^(2k / D')) - 1], h = 1 ... H.

Chi, Fan, Rudnicky, Ramadge: Dissecting Transformer Length Extrapolation via the Lens of Receptive
Field Analysis (arXiv 2212.10356), section 6: what is left of sinusoidal embeddings when they enter the
scores, with one slope a head. The -1 a term makes the bias 0 at d = 0; softmax does not see it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import whole

BASE = 10000.0


class Sandwich(PositionMethod):
    """Saves and learns nothing. The sum is taken in float64: in fp32 its angles are too coarse.

    Options: `dimension` D' (even, >= 2), twice the number of terms, 128 in the paper whatever the head
    size; `first_index`, the first k: 0 is the product of two sinusoidal embeddings, 1 is NeMo's count.
    """

    where: Tensor

    def __init__(
        self, geometry: Geometry, *, dimension: int = 128, first_index: int = 0, **common: Any
    ) -> None:
        super().__init__(geometry, **common)
        whole("sandwich", "dimension", dimension)
        whole("sandwich", "first_index", first_index)
        if dimension < 2 or dimension % 2:
            raise ValueError(f"sandwich: dimension={dimension} must be even and at least 2")
        if first_index not in (0, 1):
            raise ValueError(f"sandwich: first_index={first_index} must be 0 or 1")
        self.dimension, self.first_index = dimension, first_index
        # Without values: its device and dtype are the module's. No state dict would bring values back
        # that a module built on the meta device never had.
        self.register_buffer("where", torch.empty(0, dtype=torch.float32), persistent=False)

    @property
    def ratio(self) -> Tensor:
        """H / (8h) of the owned heads, rounded to fp32: [H]."""
        first, last = self.first_head + 1, self.first_head + self.owned_heads
        heads = torch.arange(first, last + 1, device=self.where.device, dtype=torch.float32)
        return (self.heads / (8 * heads)).to(self.where.dtype)

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor:
        """fp32 [H, *distance.shape], 0 at d = 0, below 0 elsewhere; falls, but not steadily."""
        exact = distance.double()
        total = torch.zeros_like(exact)
        # Term by term: all at once would take dimension / 2 times the memory.
        for k in range(self.first_index, self.first_index + self.dimension // 2):
            total += torch.cos(exact / BASE ** (2 * k / self.dimension)) - 1
        ratio = self.ratio.double().view(-1, *[1] * distance.dim())
        return (ratio * total).to(self.ratio.dtype)

    def _options(self) -> dict[str, Any]:
        return {
            "dimension": self.dimension,
            "first_index": self.first_index,
            **super()._options(),
        }
