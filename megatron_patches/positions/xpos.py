"""xPos: rotary, and pair m of a query and a key at distance d weighs zeta_m^(d / scale_base).

Sun et al.: A Length-Extrapolatable Transformer (arXiv 2212.10554), section 3.1; halves form the pairs
here, neighbours in the authors' code: the same function up to a fixed order of the dimensions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import finite
from megatron_patches.positions._rotation import Rotation

GAMMA = 0.4
# The largest power of e for the factor of a key: e^3 (float16) to e^8 below what the dtype can hold, for
# the key itself. A query's factor vanishes at the same place.
LARGEST = {torch.float16: 8.0, torch.bfloat16: 80.0, torch.float32: 80.0, torch.float64: 700.0}


class XPos(Rotation):
    """Saves and learns nothing. Queries are multiplied by zeta^(p / scale_base), keys divided by it.

    Powers count from position 0, so that transformed keys may stay in a cache. Keys of the fastest pair
    would leave float32 near position 36,000, float16 near 4,500: refused from 32,696 and 3,270 tokens on.

    Options: `scale_base` > 0, 512 in the authors' code; those of `Rotation`.
    """

    module_name = "xpos"

    def __init__(self, geometry: Geometry, *, scale_base: float = 512.0, **common: Any) -> None:
        super().__init__(geometry, **common)
        if finite("xpos", "scale_base", scale_base) <= 0:
            raise ValueError(f"xpos: scale_base={scale_base} must be positive")
        self.scale_base = float(scale_base)

    def can_read(self, length: int) -> None:
        """Also raises ValueError where float32 cannot hold the factors of so many tokens."""
        super().can_read(length)
        self._check(length, torch.float32)

    def transform(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        *,
        hidden: Tensor | None = None,
        total_length: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q and k [B, H, L, D] turned and scaled at `positions` ([L] or [B, L]).

        Raises ValueError where q's dtype cannot hold the factors of `total_length` (or L) tokens.
        """
        whole = total_length if isinstance(total_length, int) else positions.shape[-1]
        self._check(whole, q.dtype)
        cos, sin = self.rotation(positions.to(q.device), q.dtype)
        steps = torch.arange(0, self.rotated, 2, device=q.device, dtype=cos.dtype)
        zeta = (steps / self.rotated + GAMMA) / (1 + GAMMA)
        factor = zeta ** (positions.to(cos)[..., None] / self.scale_base)
        factor = factor if positions.dim() == 1 else factor[:, None]
        return (
            self.turn(q, cos * factor, sin * factor),
            self.turn(k, cos / factor, sin / factor),
        )

    def _check(self, length: int, dtype: torch.dtype) -> None:
        fastest = -math.log(GAMMA / (1 + GAMMA))
        last = int(LARGEST[dtype] * self.scale_base / fastest)
        if length > last:
            raise ValueError(
                f"xpos cannot read {length} tokens: beyond {last}, the factors of its keys leave {dtype}; "
                "a larger scale_base reaches farther"
            )

    def _options(self) -> dict[str, Any]:
        return {"scale_base": self.scale_base, **super()._options()}
