"""KERPLE, multiplicative kernel with two parameters: score * exp(-wei_a * d^wei_p).

arXiv 2205.09921, the ablation's "2-para-wht".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_patches.positions._kerple import EXPONENT, Kerple, Number, power

ALIASES = ("kerple_power__ap",)


class KerpleWeight(Kerple):
    """`wei_p` [H, 1, 1] is the exponent r2 <= 2, `wei_a` [H, 1, 1] the rate r1."""

    numbers = {"wei_p": EXPONENT, "wei_a": Number(outer=True)}
    wei_p: nn.Parameter
    wei_a: nn.Parameter

    def weight(self, distance: Tensor) -> Tensor:
        """exp(-wei_a * d^wei_p): fp32 [H, *distance.shape], 1 at d = 0, falling."""
        powers = power(self.rounded(distance), self.legal("wei_p", distance))
        return self.result(torch.exp(-self.legal("wei_a", distance) * powers))
