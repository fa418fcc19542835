"""FIRE: a small network of psi(d) / psi(max(i, threshold)), psi(x) = log(|c x| + 1).

Li et al.: Functional Interpolation for Relative Positions Improves Long Context Transformers (arXiv
2310.04418), section 3; names, defaults and start values as in the listing that circulates, without
its last bias: a constant a head, which softmax does not see and Adam would still move.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import finite, whole
from megatron_patches.positions._perceptron import perceptron
from megatron_patches.positions._piecewise import relu_network

SMALLEST = 1e-6  # beside the normaliser


class Fire(PositionMethod):
    """`c` [1], `L_multiplier` [1], `mlp.0.weight` [W, 1], `mlp.0.bias` [W], `mlp.2.weight` [H, W].

    The threshold is |L_multiplier * initial_length|: up to that query position the bias depends on the
    distance alone, beyond it every row is squeezed into [0, 1].

    Options: `width` W of the network, `initial_c` > 0, `initial_length` > 0 in tokens.
    """

    tier = "positional"
    module_name = "rpe"
    sharing = "layer"
    c: nn.Parameter
    L_multiplier: nn.Parameter

    def __init__(
        self,
        geometry: Geometry,
        *,
        width: int = 32,
        initial_c: float = 0.1,
        initial_length: float = 512.0,
        **common: Any,
    ) -> None:
        super().__init__(geometry, **common)
        options = {"width": width, "initial_c": initial_c, "initial_length": initial_length}
        for key, value in options.items():
            check = whole if key == "width" else finite
            if check("fire", key, value) <= 0:
                raise ValueError(f"fire: {key}={value} must be positive")
        self.width, self.initial_c = width, float(initial_c)
        self.initial_length = float(initial_length)
        self.c = nn.Parameter(torch.tensor([initial_c], dtype=torch.float32))
        self.L_multiplier = nn.Parameter(torch.tensor([1.0], dtype=torch.float32))
        self.mlp = perceptron(geometry.seed, inputs=1, width=width, outputs=self.heads)
        every = self.mlp.get_parameter("2.weight")
        every.data = every[self.first_head : self.first_head + self.owned_heads].detach().clone()
        for key in ("c", "L_multiplier", "mlp.0.weight", "mlp.0.bias"):
            self.head_dim_of[key] = None
        self.head_dim_of["mlp.2.weight"] = 0

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor:
        """fp32 [H, *distance.shape], of any sign.

        `query_position` broadcasts over the last dimension but one of `distance`, [Q] for [Q, K]. None:
        queries within the threshold.
        """
        dtype = self.working_dtype(self.c)
        c = self.c.to(dtype)[0]
        last = start = self._threshold(dtype)
        if query_position is not None:
            last = torch.maximum(query_position.to(dtype), start)[..., None]
        share = _psi(c, distance.to(dtype)) / (_psi(c, last) + SMALLEST)
        outer = self.get_parameter("mlp.2.weight").to(dtype)
        weight, bias = (self.get_parameter(f"mlp.0.{key}").to(dtype) for key in ("weight", "bias"))
        return self.result(relu_network(share, weight[:, 0], bias, outer))

    def _threshold(self, dtype: torch.dtype) -> Tensor:
        return (self.L_multiplier.to(dtype)[0] * self.initial_length).abs()

    @property
    def rows_by_distance(self) -> int:
        """Those below the threshold; one that stands on it would share its gradient with the position."""
        threshold = float(self._threshold(self.working_dtype(self.c)).detach())
        return math.ceil(threshold) if math.isfinite(threshold) else 0

    def _options(self) -> dict[str, Any]:
        return {
            "width": self.width,
            "initial_c": self.initial_c,
            "initial_length": self.initial_length,
            **super()._options(),
        }


def _psi(c: Tensor, x: Tensor) -> Tensor:
    return torch.log1p((c * x).abs())
