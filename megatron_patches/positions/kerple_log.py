"""KERPLE, logarithmic kernel: -bias_p * log(1 + bias_a * d).

arXiv 2205.09921, section 4, equation of the 2-parameter logarithmic variant.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_patches.positions._closed_form import ClosedForm
from megatron_patches.positions._kerple import Kerple, Number, within


class KerpleLog(Kerple):
    """`bias_p` [H, 1, 1] is the outer scale r1, `bias_a` [H, 1, 1] the inner rate r2."""

    numbers = {"bias_p": Number(draw=2.0, outer=True), "bias_a": Number()}
    bias_p: nn.Parameter
    bias_a: nn.Parameter

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor:
        """-bias_p * log(1 + bias_a * d): fp32 [H, *distance.shape], 0 at d = 0, falling."""
        return log_bias(self, distance)

    def closed_form(self) -> ClosedForm | None:
        """Kind "log"."""
        if self.published_dtype is not None:
            return None
        each_head = torch.empty(())
        return ClosedForm("log", self.legal("bias_p", each_head), self.legal("bias_a", each_head))


def log_bias(kernel: Kerple, distance: Tensor) -> Tensor:
    """The formula, for any method with these two numbers."""
    inner = within(1 + kernel.legal("bias_a", distance) * kernel.rounded(distance))
    return kernel.result(-kernel.legal("bias_p", distance) * torch.log(inner))
