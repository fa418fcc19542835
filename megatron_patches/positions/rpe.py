"""T5's relative bias: sqrt(head_dim) * weight[bucket(d)], causal.

Raffel et al.: Exploring the Limits of Transfer Learning (arXiv 1910.10683), section 2.1; scale and
initial values as in GPT-NeoX.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import whole


class T5Bias(PositionMethod):
    """`weight` [buckets, H], Xavier-normal over all heads.

    Options: `rpe_num_buckets` (even, >= 2); `rpe_max_distance` (> half the buckets), from which on
    all distances share the last bucket.
    """

    module_name = "rpe"
    precisions = ("exact", "as_published")

    def __init__(
        self,
        geometry: Geometry,
        *,
        rpe_num_buckets: int = 32,
        rpe_max_distance: int = 128,
        **common: Any,
    ) -> None:
        super().__init__(geometry, **common)
        whole("rpe", "rpe_num_buckets", rpe_num_buckets)
        whole("rpe", "rpe_max_distance", rpe_max_distance)
        if rpe_num_buckets < 2 or rpe_num_buckets % 2:
            raise ValueError(f"rpe: rpe_num_buckets={rpe_num_buckets} must be even and at least 2")
        if rpe_max_distance <= rpe_num_buckets // 2:
            raise ValueError(
                f"rpe: rpe_max_distance={rpe_max_distance} must be more than half of "
                f"rpe_num_buckets={rpe_num_buckets}"
            )
        self.num_buckets, self.max_distance = rpe_num_buckets, rpe_max_distance
        self.scale = math.sqrt(self.head_dim)
        generator = torch.Generator().manual_seed(geometry.seed)
        size = (rpe_num_buckets, self.heads)
        draw = torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
        draw *= math.sqrt(2 / (rpe_num_buckets + self.heads))
        owned = draw[:, self.first_head : self.first_head + self.owned_heads].contiguous()
        self.own("weight", owned.to(torch.get_default_device()))
        self.head_dim_of["weight"] = 1

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, int64, same shape: half of them exact, the others by log."""
        exact = self.num_buckets // 2
        # Divides first, as GPT-NeoX does: in another order some whole numbers round to the bucket below.
        share = (distance.float().clamp(min=exact) / exact).log()
        share = share / math.log(self.max_distance / exact)
        by_log = exact + (share * (self.num_buckets - exact)).long()
        by_log = by_log.clamp(max=self.num_buckets - 1)
        return torch.where(distance < exact, distance.long(), by_log)

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor:
        """sqrt(head_dim) * weight[bucket(d)]: fp32 [H, *distance.shape], of any sign."""
        stored = self.get_parameter("weight")
        weight_HK = stored.to(self.working_dtype(stored)).t()
        values = weight_HK.index_select(1, self.bucket(distance).flatten()) * self.scale
        return self.result(values).view(-1, *distance.shape)

    def _options(self) -> dict[str, Any]:
        return {
            "rpe_num_buckets": self.num_buckets,
            "rpe_max_distance": self.max_distance,
            **super()._options(),
        }
