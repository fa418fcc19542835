"""GGD-BAM with scalable softmax: a row of scores times s_h * log(number of keys that its query sees).

Bianchessi et al.: Bayesian Attention Mechanism (arXiv 2505.22842), with the factor of Nakanishi:
Scalable-Softmax Is Superior for Attention (arXiv 2501.19399), so that a long row does not grow flat. The
first query sees one key and its factor is 0. Keys are counted after padding and window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import truth
from megatron_patches.positions.ggd_bam import GgdBam


class GgdBamSsmax(GgdBam):
    """Those of `ggd_bam`, and `ssmax` [H, 1, 1], without bounds, 1 at the start.

    Options: `learn_loc` as in `ggd_bam`; `scale_prior`: the factor multiplies content and prior (as in
    the authors' models), without it the content alone.
    """

    tier = "content"
    ssmax: nn.Parameter

    def __init__(self, geometry: Geometry, *, scale_prior: bool = True, **common: Any) -> None:
        super().__init__(geometry, **common)
        self.scale_prior = truth(self.name, "scale_prior", scale_prior)
        self.ssmax = nn.Parameter(torch.ones(self.owned_heads, 1, 1, dtype=torch.float32))
        self.head_dim_of["ssmax"] = 0

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> None:
        """None: the prior is added in `score`."""
        return None

    def score(
        self,
        scores_BHQK: Tensor,
        distance_QK: Tensor,
        query_position_Q: Tensor,
        *,
        query_BHQD: Tensor,
        visible_QK: Tensor,
    ) -> Tensor:
        """Scores and prior times their factor, [B, H, Q, K]."""
        dtype = scores_BHQK.dtype
        prior = self.prior(distance_QK).to(dtype)
        # A query under padding sees no key at all.
        seen = visible_QK.sum(-1, keepdim=True).clamp(min=1)
        factor = self.ssmax.to(dtype) * seen.to(dtype).log()
        if self.scale_prior:
            return (scores_BHQK + prior) * factor
        return scores_BHQK * factor + prior

    def _options(self) -> dict[str, Any]:
        return {"scale_prior": self.scale_prior, **super()._options()}
