"""A network of one input and one layer of ReLUs, evaluated as the piecewise linear function that it is.

Between two neighbouring kinks -bias / weight every output is a straight line, so a look-up and one
multiplication replace `width` hidden values. Exact but for the order of summation.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from megatron_patches.positions._once import first_order


def relu_network(u: Tensor, weight_W: Tensor, bias_W: Tensor, outer_HW: Tensor) -> Tensor:
    """`outer @ relu(weight * u + bias)`: [H, *u.shape], in the dtype of `u`; differentiable once."""
    kinks = (-bias_W / weight_W).detach()
    # A hidden value without a kink gets one anywhere: the same line goes on behind it.
    kinks = torch.where(kinks.isfinite(), kinks, torch.zeros_like(kinks)).sort().values
    middle = torch.cat([kinks[:1] - 1, (kinks[1:] + kinks[:-1]) / 2, kinks[-1:] + 1])
    on_SW = (middle[:, None] * weight_W.detach() + bias_W.detach() > 0).to(u.dtype)
    # Small tensors: how they depend on the network is left to autograd.
    slope_HS = outer_HW @ (on_SW * weight_W).t()
    intercept_HS = outer_HW @ (on_SW * bias_W).t()
    return cast(Tensor, _Lines.apply(u, torch.bucketize(u.detach(), kinks), slope_HS, intercept_HS))


class _Lines(torch.autograd.Function):
    """`slope[:, segment] * u + intercept[:, segment]`, one head at a time."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, segment: Tensor, slope_HS: Tensor, intercept_HS: Tensor
    ) -> Tensor:
        ctx.save_for_backward(u, segment, slope_HS)
        out = u.new_empty(len(slope_HS), *u.shape)
        for head, (slope, intercept) in enumerate(zip(slope_HS, intercept_HS, strict=True)):
            torch.addcmul(intercept[segment], slope[segment], u, out=out[head])
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, segment, slope_HS = ctx.saved_tensors
        grad_u = torch.zeros_like(u)
        grad_slope, grad_intercept = torch.zeros_like(slope_HS), torch.zeros_like(slope_HS)
        flat, count = segment.flatten(), slope_HS.shape[1]
        for head, (slope, part) in enumerate(zip(slope_HS, grad, strict=True)):
            grad_u.addcmul_(slope[segment], part)
            grad_slope[head] = torch.bincount(flat, (part * u).flatten(), minlength=count)
            grad_intercept[head] = torch.bincount(flat, part.flatten(), minlength=count)
        return grad_u, None, grad_slope, grad_intercept
