"""ALiBi: -slope * d, with fixed slopes.

Press, Smith, Lewis: Train Short, Test Long (arXiv 2108.12409), section 3.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._closed_form import ClosedForm
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._slopes import CONVENTION, alibi_slopes


class Alibi(PositionMethod):
    """Saves the buffer `slopes` [H], fp32, in the authors' order; learns nothing."""

    module_name = "alibi_embed"
    precisions: ClassVar[tuple[str, ...]] = ("exact", "as_published")
    slopes: Tensor

    def __init__(self, geometry: Geometry, **common: Any) -> None:
        super().__init__(geometry, **common)
        owned = alibi_slopes(self.heads)[self.first_head : self.first_head + self.owned_heads]
        self.register_buffer("slopes", torch.tensor(owned, dtype=torch.float32))
        self.head_dim_of["slopes"] = 0

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor:
        """-slope * d: fp32 [H, *distance.shape], 0 at d = 0, falling."""
        dtype = self.working_dtype(self.slopes)
        slopes = self.slopes.to(dtype).view(-1, *[1] * distance.dim())
        return self.result(-slopes * distance.to(dtype))

    def closed_form(self) -> ClosedForm | None:
        """Kind "linear"."""
        return None if self.published_dtype is not None else ClosedForm("linear", self.slopes)

    def _options(self) -> dict[str, Any]:
        return {"slopes": CONVENTION, **super()._options()}
