"""CoPE: score + query . e[count], count: the sum of sigmoid(score) over the keys from this one to the query.

Golovneva et al.: Contextual Position Encoding (arXiv 2405.18719), section 4. A count between two whole
numbers takes a share of both vectors, and counts end at the last one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import truth, whole
from megatron_patches.positions._sums import sum_to_the_end


class Cope(PositionMethod):
    """`pos_emb` [1, D, N], the vectors e of the counts 0 ... N - 1, one table for all heads; starts at 0.

    Options:
        divide: also divides the new term by sqrt(D), as the authors' code does unless told otherwise;
            else it is added to the scaled scores, as in the paper's listing.
        positions: N >= 2; None: max_length + 1, so that no count of the training length is cut.
    """

    tier = "content"
    module_name = "rpe"
    sharing = "layer"
    rounding_jumps = "gradients jump where rounding moves a count past a whole number"
    pos_emb: nn.Parameter

    def __init__(
        self,
        geometry: Geometry,
        *,
        divide: bool = False,
        positions: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(geometry, **common)
        if positions is None:
            if geometry.max_length is None:
                raise ValueError("cope needs positions, the size of its table, or max_length")
            positions = geometry.max_length + 1
        if whole("cope", "positions", positions) < 2:
            raise ValueError(f"cope: positions={positions} must be at least 2")
        self.divide, self.positions = truth("cope", "divide", divide), positions
        self.pos_emb = nn.Parameter(torch.zeros(1, self.head_dim, positions, dtype=torch.float32))
        self.head_dim_of["pos_emb"] = None

    def score(
        self,
        scores_BHQK: Tensor,
        distance_QK: Tensor,
        query_position_Q: Tensor,
        *,
        query_BHQD: Tensor,
        visible_QK: Tensor,
    ) -> Tensor:
        """Scores with the term of each key's count, [B, H, Q, K]; counts are at least fp32.

        The gradient reaches the gates through a count's shares, and ends where the count is cut.
        """
        gates = torch.sigmoid(scores_BHQK) * visible_QK.to(scores_BHQK.dtype)
        count = sum_to_the_end(gates).clamp(max=self.positions - 1)
        lower = count.detach().floor()
        share, index = count - lower, lower.long()
        every_BHQN = query_BHQD @ self.pos_emb[0].to(query_BHQD.dtype)
        # A step up instead of the vector above: one index for both. No step leads beyond the last.
        steps_BHQN = F.pad(every_BHQN.diff(dim=-1), (0, 1))
        term = every_BHQN.gather(-1, index) + steps_BHQN.gather(-1, index) * share
        return scores_BHQK + (term / math.sqrt(self.head_dim) if self.divide else term)

    def _options(self) -> dict[str, Any]:
        return {"divide": self.divide, "positions": self.positions, **super()._options()}
