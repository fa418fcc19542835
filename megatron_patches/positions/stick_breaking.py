"""Stick-breaking: from the query backwards, each key takes sigmoid(score) of the weight that is left.

Tan et al.: Scaling Stick-Breaking Attention (arXiv 2410.17980), section 2. What no key before the query
takes stays on the query's own value, as in the authors' models, so that the weights of a row sum to 1.
Their form that throws this rest away is not offered: its weights do not sum to 1, softmax's do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import truth
from megatron_patches.positions._sums import sum_to_the_end


class StickBreaking(PositionMethod):
    """Saves and learns nothing.

    Options: `current`: the query's own key also takes by its score, before all others; without it,
    that key gets the rest alone.
    """

    tier = "content"

    def __init__(self, geometry: Geometry, *, current: bool = False, **common: Any) -> None:
        super().__init__(geometry, **common)
        self.current = truth(self.name, "current", current)

    def score(
        self,
        scores_BHQK: Tensor,
        distance_QK: Tensor,
        query_position_Q: Tensor,
        *,
        query_BHQD: Tensor,
        visible_QK: Tensor,
    ) -> Tensor:
        """Logarithms of the weights, [B, H, Q, K]: softmax gives back their exponentials.

        Keys that are not visible leave all to the others. At least fp32.
        """
        takes = visible_QK if self.current else visible_QK & (distance_QK > 0)
        left = sum_to_the_end(F.logsigmoid(-scores_BHQK) * takes.to(scores_BHQK.dtype))
        # log sigmoid(s) = s + log sigmoid(-s): what a key takes and what it leaves share one logarithm.
        taken, rest = scores_BHQK + left, left[..., :1]
        if self.current:
            own_Q1 = (distance_QK > 0).sum(-1, keepdim=True)
            own = taken.gather(-1, own_Q1.expand(*taken.shape[:2], -1, -1))
            rest = torch.logaddexp(own, rest)
        # Distances of later keys are 0 as well here; the mask hides those whatever they score.
        return torch.where(distance_QK == 0, rest, taken)

    def _options(self) -> dict[str, Any]:
        return {"current": self.current, **super()._options()}
