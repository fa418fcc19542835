"""No position signal: only the causal mask tells positions apart.

Haviv et al.: Transformer Language Models without Positional Encodings Still Learn Positional
Information (arXiv 2203.16634). Scores may be multiplied by a temperature for longer texts: Wang et al.,
Length Generalization of Causal Transformers without Position Encoding (arXiv 2404.12224).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import finite

HEADS = "heads"


class NoPosition(PositionMethod):
    """Every hook does nothing, unless there is a temperature; then both precisions are no longer the same.

    Options: `temperature` > 0, on the scores of all heads and layers (a trained model may be read with
    another), or "heads": the parameter `scale` [H], learned, one set a layer. `initial_temperature` is
    where those start; the authors tune them alone, from 1.6, at the length they are for.
    """

    precisions = ("exact", "as_published")
    evaluation_options = ("temperature",)

    def __init__(
        self,
        geometry: Geometry,
        *,
        temperature: float | str = 1.0,
        initial_temperature: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(geometry, **common)
        learned = temperature == HEADS
        if not learned:
            _check("temperature", temperature, f" or {HEADS!r}")
        _check("initial_temperature", initial_temperature)
        if not learned and initial_temperature != 1.0:
            raise ValueError(
                f"none: initial_temperature={initial_temperature} belongs to temperature={HEADS}"
            )
        if self.published_dtype is not None and temperature != 1.0:
            raise ValueError(
                f"none: temperature={temperature} has no precision='as_published'; leave one of them out"
            )
        self.temperature, self.initial = temperature, float(initial_temperature)
        if learned:
            self.sharing = "layer"
            start = torch.full((self.owned_heads,), self.initial, dtype=torch.float32)
            self.scale = nn.Parameter(start)
            self.head_dim_of["scale"] = 0

    @property
    def transforms(self) -> bool:
        """Whether there is a temperature other than 1."""
        return self.temperature != 1.0

    def transform(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        *,
        hidden: Tensor | None = None,
        total_length: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q [B, H, L, D] times the temperature, computed in fp32 (float64 for float64), and k as it is."""
        if not self.transforms:
            return q, k
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        if isinstance(self.temperature, str):
            factor: Tensor | float = self.scale.to(exact)[:, None, None]
        else:
            factor = self.temperature
        return (q.to(exact) * factor).to(q.dtype), k

    def _options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"temperature": self.temperature} if self.transforms else {}
        if self.temperature == HEADS:
            found["initial_temperature"] = self.initial
        return {**found, **super()._options()}


def _check(name: str, value: Any, other: str = "") -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not value > 0:
        raise ValueError(f"none: {name}={value!r} must be a number above 0{other}")
    finite("none", name, value)
