"""Rotary embedding: queries and keys are turned by angles proportional to their positions.

Su et al.: RoFormer (arXiv 2104.09864), section 3.2. Frequencies may be stretched for longer texts:
position interpolation (2306.15595), NTK-aware bases, YaRN (2309.00071); `_rope_scaling.py` has the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._rope_scaling import RopeScaling
from megatron_patches.positions._rotation import Rotation


class Rotary(Rotation):
    """Saves and learns nothing. All options but the first two may be set when a trained model is read.

    Under a dynamic scaling the angles of a whole text follow its length: earlier tokens change when later
    ones arrive. So a cache keeps raw keys, and decoding equals a pass over the whole text in the first
    layer only: the keys of deeper layers were computed from what the text was when they were read.

    Options: `rotary_pct` and `rotary_emb_base` (`Rotation`). `scaling`: "none", "linear" (position
    interpolation), "ntk", "yarn", "dynamic_linear", "dynamic_ntk", "dynamic_yarn". `factor` >= 1, of the
    static kinds and, 1 unless given, of dynamic_ntk. `original_length`: tokens of the training, of yarn and
    the dynamic kinds; None: the geometry's `max_length`. Of yarn: `beta_fast`, `beta_slow`, `truncate` (whole
    pairs at both ends of its ramp), and `attention_factor` on cosines and sines, None: 0.1 ln(factor) + 1.
    """

    module_name = "rotary_emb"
    evaluation_options = (
        *("scaling", "factor", "original_length", "beta_fast", "beta_slow"),
        *("attention_factor", "truncate"),
    )

    def __init__(
        self,
        geometry: Geometry,
        *,
        scaling: str = "none",
        factor: float | None = None,
        original_length: int | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        truncate: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(geometry, **common)
        try:
            self.scaling = RopeScaling(
                rotated=self.rotated,
                base=self.base,
                scaling=scaling,
                factor=factor,
                original_length=original_length,
                trained_length=geometry.max_length,
                beta_fast=beta_fast,
                beta_slow=beta_slow,
                attention_factor=attention_factor,
                truncate=truncate,
            )
        except ValueError as error:
            raise ValueError(f"rotary: {error}") from None
        if self.scaling.dynamic:
            self.cache = "raw"

    def transform(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        *,
        hidden: Tensor | None = None,
        total_length: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q and k [B, H, L, D] turned by `positions` ([L] or [B, L]); shape and dtype are kept.

        Raises ValueError where the scaling is dynamic and `total_length` is None.
        """
        positions = positions.to(q.device)
        if self.scaling.scaling == "none":
            cos, sin = self.rotation(positions, q.dtype)
        else:
            cos, sin = self._scaled(positions, q.dtype, total_length)
        return self.turn(q, cos, sin), self.turn(k, cos, sin)

    def _scaled(
        self, positions: Tensor, dtype: torch.dtype, length: int | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if length is None and self.scaling.dynamic:
            raise ValueError(f"rotary: scaling={self.scaling.scaling} needs the total length")
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        if length is not None and not isinstance(length, Tensor):
            length = torch.full((), float(length), dtype=exact, device=positions.device)
        positions = positions.to(exact)
        spacing, amplitude = self.scaling.spacing(length, positions)
        cos, sin = self.waves(positions, spacing)
        if isinstance(amplitude, Tensor) and amplitude.dim() == 2:  # one a row of the batch
            amplitude = amplitude[:, :, None, None]
        return cos * amplitude, sin * amplitude

    def rope_parameters(self) -> dict[str, Any] | None:
        """None for the dynamic scalings."""
        found = self.scaling.rope_parameters()
        return None if found is None else {**found, "partial_rotary_factor": self.pct}

    def _options(self) -> dict[str, Any]:
        return {**self.scaling.options(), **super()._options()}
