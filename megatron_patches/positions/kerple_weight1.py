"""KERPLE, multiplicative Gaussian: score * exp(-wei_a * d^2).

arXiv 2205.09921, the ablation's "1-para-wht". The authors did not release it; `wei_a` is the
rate as in `kerple_weight`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_patches.positions._kerple import Kerple, Number


class KerpleWeight1(Kerple):
    """`wei_a` [H, 1, 1] is the rate r1."""

    precisions = ("exact",)  # nothing published to round like
    numbers = {"wei_a": Number(outer=True)}
    wei_a: nn.Parameter

    def weight(self, distance: Tensor) -> Tensor:
        """exp(-wei_a * d^2): fp32 [H, *distance.shape], 1 at d = 0, falling."""
        squares = self.rounded(distance).square()
        return self.result(torch.exp(-self.legal("wei_a", distance) * squares))
