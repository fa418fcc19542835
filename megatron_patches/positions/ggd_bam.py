"""GGD-BAM: -e^scale * (|d + mu| + 1e-5)^shape, mu = 2 sinh(loc): a generalised Gaussian prior.

Bianchessi et al.: Bayesian Attention Mechanism (arXiv 2505.22842), section 3. shape = 1 is ALiBi with
slope e^scale, 0 < shape <= 2 the power kernel of KERPLE; a negative shape pushes attention away from
near keys, and is meant to be possible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import truth
from megatron_patches.positions._slopes import alibi_slopes

NEAREST = 1e-5  # keeps a negative shape finite at d = 0


class GgdBam(PositionMethod):
    """`scale`, `shape` and, if learned, `loc`: each [H, 1, 1]; no bounds. Starts as ALiBi.

    Options: `learn_loc`: also learn the centre; the paper fixes it at 0 and then nothing is saved.
    """

    module_name = "rpe"
    sharing = "layer"
    scale: nn.Parameter
    shape: nn.Parameter

    def __init__(self, geometry: Geometry, *, learn_loc: bool = False, **common: Any) -> None:
        super().__init__(geometry, **common)
        self.learn_loc = truth(self.name, "learn_loc", learn_loc)
        slopes = torch.tensor(alibi_slopes(self.heads), dtype=torch.float32)
        start = {"scale": slopes.log(), "shape": torch.ones_like(slopes)}
        if learn_loc:
            start["loc"] = torch.zeros_like(slopes)
        for key, values in start.items():
            owned = values[self.first_head : self.first_head + self.owned_heads, None, None]
            self.register_parameter(key, nn.Parameter(owned.clone()))
            self.head_dim_of[key] = 0

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor | None:
        """The prior."""
        return self.prior(distance)

    def prior(self, distance: Tensor) -> Tensor:
        """fp32 [H, *distance.shape], <= 0; at d = 0 it is -e^scale * 1e-5^shape, not 0."""
        scale, shape = (self._broadcast(key, distance) for key in ("scale", "shape"))
        away = distance.to(scale.dtype)
        if self.learn_loc:
            away = (away + 2 * torch.sinh(self._broadcast("loc", distance))).abs()
        return self.result(-scale.exp() * (away + NEAREST).pow(shape))

    def _broadcast(self, key: str, distance: Tensor) -> Tensor:
        stored = self.get_parameter(key)
        return stored.to(self.working_dtype(stored)).view(-1, *[1] * distance.dim())

    def _options(self) -> dict[str, Any]:
        return {"learn_loc": self.learn_loc, **super()._options()}
