"""KERPLE, power kernel: -bias_a * d^bias_p.

arXiv 2205.09921, section 4, the 2-parameter power variant.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_patches.positions._closed_form import ClosedForm
from megatron_patches.positions._kerple import EXPONENT, Kerple, Number, power

ALIASES = ("kerple_power_ap_",)


class KerplePower(Kerple):
    """`bias_p` [H, 1, 1] is the exponent r2 <= 2, `bias_a` [H, 1, 1] the scale r1."""

    numbers = {"bias_p": EXPONENT, "bias_a": Number(outer=True)}
    bias_p: nn.Parameter
    bias_a: nn.Parameter

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor:
        """-bias_a * d^bias_p: fp32 [H, *distance.shape], 0 at d = 0, falling."""
        powers = power(self.rounded(distance), self.legal("bias_p", distance))
        return self.result(-self.legal("bias_a", distance) * powers)

    def closed_form(self) -> ClosedForm | None:
        """Kind "power"."""
        if self.published_dtype is not None:
            return None
        each_head = torch.empty(())
        return ClosedForm("power", self.legal("bias_a", each_head), self.legal("bias_p", each_head))
