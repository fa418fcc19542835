"""KERPLE, logarithmic kernel with three parameters: -bias_p * log(1 + bias_a * d^bias_e).

arXiv 2205.09921, the ablation's "3-para-log". The authors did not release it; the parameter names
continue those of `kerple_log`, initial values and bounds follow the released kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_patches.positions._kerple import EXPONENT, Kerple, Number, power


class KerpleLog3(Kerple):
    """Each [H, 1, 1]: `bias_p` outer scale r1, `bias_a` inner rate r2, `bias_e` exponent r3."""

    precisions = ("exact",)  # nothing published to round like
    numbers = {"bias_p": Number(draw=2.0, outer=True), "bias_a": Number(), "bias_e": EXPONENT}
    bias_p: nn.Parameter
    bias_a: nn.Parameter
    bias_e: nn.Parameter

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor:
        """-bias_p * log(1 + bias_a * d^bias_e): fp32 [H, *distance.shape], 0 at d = 0, falling."""
        powers = power(self.rounded(distance), self.legal("bias_e", distance))
        inner = 1 + self.legal("bias_a", distance) * powers
        return self.result(-self.legal("bias_p", distance) * torch.log(inner))
