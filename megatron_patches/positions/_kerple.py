"""What the KERPLE kernels share: drawing, bounds, rounding.

Chi, Fan, Ramadge, Rudnicky: KERPLE (arXiv 2205.09921), sections 3 to 5; initial values, bounds and
parameter names as in the authors' code (chijames/KERPLE).
"""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._slopes import alibi_slopes

LOWEST = 0.01


class Number(NamedTuple):
    """One learned number per head: drawn from `draw` * U(0, 1), kept within [0.01, highest]."""

    draw: float = 1.0
    outer: bool = False  # the scale in front of the kernel
    highest: float = inf


EXPONENT = Number(draw=2.0, highest=2.0)  # above 2 a power of the distance is no longer a kernel


class Kerple(PositionMethod):
    """Base of the kernels. A subclass lists its `numbers` and writes its formula.

    Options:
        init: "published": as in the authors' code, from the seed; "alibi": nothing random, each
            kernel's outer scale is ALiBi's slope (lifted to 0.01 where flatter), all else is 1.

    Parameters are [H, 1, 1]. The forward pass uses legal values whatever is stored; the gradient
    passes the limits unchanged (straight through), so a number can come back from outside.
    """

    module_name = "rpe"
    precisions: ClassVar[tuple[str, ...]] = ("exact", "as_published")
    numbers: ClassVar[dict[str, Number]] = {}

    def __init__(self, geometry: Geometry, *, init: str = "published", **common: Any) -> None:
        super().__init__(geometry, **common)
        if init not in ("published", "alibi"):
            raise ValueError(f"{self.name}: init={init!r} is neither 'published' nor 'alibi'")
        self.init = init
        generator = torch.Generator().manual_seed(geometry.seed)
        slopes = torch.tensor(alibi_slopes(self.heads), device="cpu", dtype=torch.float32)
        for key, number in self.drawn().items():
            draw = torch.rand(self.heads, generator=generator, device="cpu", dtype=torch.float32)
            start = draw * number.draw
            if init == "alibi":
                start = slopes if number.outer else torch.ones_like(slopes)
            owned = start[self.first_head : self.first_head + self.owned_heads, None, None]
            self.register_parameter(key, nn.Parameter(owned.to(torch.get_default_device())))
            self.bounds[key] = (LOWEST, number.highest)
            self.head_dim_of[key] = 0
        self.project_()

    def drawn(self) -> dict[str, Number]:
        """The numbers that this instance has."""
        return self.numbers

    def legal(self, key: str, distance: Tensor) -> Tensor:
        """The parameter within its bounds, working dtype, shaped to broadcast as [H, *distance]."""
        stored = self.get_parameter(key)
        value = stored.to(self.working_dtype(stored)).view(-1, *[1] * distance.dim())
        # The bracket is exactly 0; it only carries the gradient past the clamp.
        return value.detach().clamp(*self.bounds[key]) + (value - value.detach())

    def rounded(self, distance: Tensor) -> Tensor:
        """The distance in the working dtype; those beyond float16 become its largest number."""
        dtype = self.working_dtype(self.get_parameter(next(iter(self.numbers))))
        return within(distance.to(dtype))

    def _options(self) -> dict[str, Any]:
        return {"init": self.init, **super()._options()}


def within(values: Tensor) -> Tensor:
    """In float16 its largest number instead of infinity, with no gradient there; else as they are.

    Such a key has no weight either way, but 0 * infinity in a gradient is NaN.
    """
    if values.dtype != torch.float16:
        return values
    return values.clamp(max=torch.finfo(torch.float16).max)


def power(distance: Tensor, exponent: Tensor) -> Tensor:
    """distance ** exponent, with a finite gradient at 0 also where a compiler rewrites pow.

    In float16, powers that it cannot hold are its largest number and have no gradient.
    """
    positive = distance > 0
    base = torch.where(positive, distance, 1.0)
    if base.dtype != torch.float16:
        return base.pow(exponent) * positive
    # float16's own pow rounds the same number, but its gradient, power * log, leaves float16 earlier.
    powers = base.float().pow(exponent.float()).clamp(max=torch.finfo(torch.float16).max)
    return powers.to(torch.float16) * positive
