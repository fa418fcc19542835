"""KERPLE, added Gaussian: bias_p * exp(-bias_a * d^2).

arXiv 2205.09921, the ablation's "2-para-bias" (the kernel of Wennberg and Henter). The authors did
not release it; names as in `kerple_log`: `bias_p` outside, `bias_a` inside.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_patches.positions._kerple import Kerple, Number


class KerpleGauss2(Kerple):
    """`bias_p` [H, 1, 1] is the outer scale r1, `bias_a` [H, 1, 1] the inner rate r2."""

    precisions = ("exact",)  # nothing published to round like
    numbers = {"bias_p": Number(draw=2.0, outer=True), "bias_a": Number()}
    bias_p: nn.Parameter
    bias_a: nn.Parameter

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor:
        """bias_p * exp(-bias_a * d^2): fp32 [H, *distance.shape], bias_p at d = 0, falling to 0."""
        kernel = torch.exp(-self.legal("bias_a", distance) * self.rounded(distance).square())
        return self.result(self.legal("bias_p", distance) * kernel)
