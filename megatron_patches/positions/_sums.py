"""Sums along a row of keys, taken from its end: what lies between a key and the query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sum_to_the_end(values: Tensor) -> Tensor:
    """Each entry of the last dimension plus all later ones; fp32, or float64 if given so.

    Adds from the end. The total less the sum before an entry would lose what is small beside it.
    """
    summed: Tensor = _SumToTheEnd.apply(values if values.dtype == torch.float64 else values.float())
    return summed


class _SumToTheEnd(torch.autograd.Function):
    """Its gradient is one sum from the start; torch's own way back turns the row round four times."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.flip(-1).cumsum_(-1).flip(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.cumsum(-1)
