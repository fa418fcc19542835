"""Turning pairs of dimensions of queries and keys: what rotary and its relatives share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import finite


class Rotation(PositionMethod):
    """Saves and learns nothing. Angles are fp32 (float64 for float64 queries).

    The first and the second half of the rotated dimensions form the pairs, as in GPT-NeoX.

    Options: `rotary_pct`, the rotated share of the head size, in (0, 1]; the number of dimensions
    is rounded down and must be even. `rotary_emb_base` (> 0).
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        rotary_pct: float = 1.0,
        rotary_emb_base: float = 10000.0,
        **common: Any,
    ) -> None:
        super().__init__(geometry, **common)
        self.rotated = int(self.head_dim * finite(self.name, "rotary_pct", rotary_pct))
        if not 0 < rotary_pct <= 1 or self.rotated < 2 or self.rotated % 2:
            raise ValueError(
                f"{self.name}: rotary_pct={rotary_pct} of head_dim={self.head_dim} are {self.rotated} "
                "dimensions; they must be an even number of at least 2 and at most head_dim"
            )
        if finite(self.name, "rotary_emb_base", rotary_emb_base) <= 0:
            raise ValueError(f"{self.name}: rotary_emb_base={rotary_emb_base} must be positive")
        self.pct, self.base = float(rotary_pct), float(rotary_emb_base)

    @property
    def inv_freq(self) -> Tensor:
        """fp32 [R / 2], radians a position: the KERPLE authors' fork saved it with each layer."""
        return self.base ** -(torch.arange(0, self.rotated, 2) / self.rotated)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles at `positions`: [L, R / 2], or [B, 1, L, R / 2] for [B, L].

        They broadcast over heads either way. fp32, or float64 for queries of that `dtype`.
        """
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        steps = torch.arange(0, self.rotated, 2, device=positions.device, dtype=exact)
        return self.waves(positions.to(exact), self.base ** (steps / self.rotated))

    @staticmethod
    def waves(positions: Tensor, spacing: Tensor) -> tuple[Tensor, Tensor]:
        """`rotation` at `positions` of the angles' dtype, `spacing` ([R / 2] or [B, R / 2]) to a radian."""
        angle = positions[..., None] / (spacing if spacing.dim() == 1 else spacing[:, None])
        angle = angle if angle.dim() == 2 else angle[:, None]
        return angle.cos(), angle.sin()

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, H, L, D] turned, in its dtype; what is not rotated stays."""
        half = self.rotated // 2
        first, second, rest = x.split([half, half, self.head_dim - self.rotated], dim=-1)
        first, second = first.to(cos.dtype), second.to(cos.dtype)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((turned.to(x.dtype), rest), dim=-1)

    def _options(self) -> dict[str, Any]:
        return {"rotary_pct": self.pct, "rotary_emb_base": self.base, **super()._options()}
