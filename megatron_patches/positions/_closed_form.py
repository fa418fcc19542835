"""A bias of two numbers a head, told so that a kernel can compute it instead of reading a table."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor


class ClosedForm(NamedTuple):
    """`bias(d) = -scale * f(d)`, per head, with f by `kind`:

    "log": log(1 + rate * d). "power": d ** rate, 0 at d = 0. "linear": d, without a rate.

    Both tensors are [H], fp32 (float64 after `to_float64_`), legal values, and carry the gradient to
    the parameters.
    """

    kind: Literal["log", "power", "linear"]
    scale: Tensor
    rate: Tensor | None = None
