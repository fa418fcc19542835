"""DAPE: a small network of all heads' scores and biases at one place adds to both of them.

Zheng et al.: Data-Adaptive Positional Encoding (arXiv 2405.14722), section 3, on KERPLE's logarithmic
kernel or on ALiBi; names and shapes as in the authors' code, without the network's last bias: a constant
a head, which softmax does not see and Adam would still move.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._kerple import Kerple, Number
from megatron_patches.positions._options import whole
from megatron_patches.positions._perceptron import perceptron
from megatron_patches.positions._slopes import alibi_slopes
from megatron_patches.positions.kerple_log import KerpleLog, log_bias

SLOPE = 0.01  # of the leaky ReLU below 0


class Dape(Kerple):
    """`mlp2.0.weight` [W, 2H], `mlp2.0.bias` [W], `mlp2.2.weight` [H, W], and the base's numbers.

    The network reads H scaled scores, then H biases. It needs the scores of all heads: no tensor
    parallel, no head range.

    Options:
        base: "kerple_log" (`bias_p`, `bias_a` [H, 1, 1]) or "alibi" (the buffer `slopes` [H]).
        width: W of the network.
        init: of kerple_log's numbers.
    """

    tier = "content"
    sharing = "layer"
    mixes_heads = True
    precisions = ("exact",)
    numbers = KerpleLog.numbers
    slopes: Tensor

    def __init__(
        self, geometry: Geometry, *, base: str = "kerple_log", width: int = 32, **common: Any
    ) -> None:
        if base not in ("kerple_log", "alibi"):
            raise ValueError(f"dape: base={base!r} is neither 'kerple_log' nor 'alibi'")
        if whole("dape", "width", width) < 1:
            raise ValueError(f"dape: width={width} must be positive")
        self.base, self.width = base, width
        super().__init__(geometry, **common)
        if base == "alibi":
            if self.init != "published":
                raise ValueError(f"dape: init={self.init!r} needs base='kerple_log'")
            slopes = torch.tensor(alibi_slopes(self.heads), dtype=torch.float32)
            self.register_buffer("slopes", slopes)
            self.head_dim_of["slopes"] = 0
        # Another seed than the base's, whose draws it would repeat.
        self.mlp2 = perceptron(
            geometry.seed + 1, inputs=2 * self.heads, width=width, outputs=self.heads
        )
        self.head_dim_of |= {"mlp2.0.weight": None, "mlp2.0.bias": None, "mlp2.2.weight": 0}

    def drawn(self) -> dict[str, Number]:
        """Those of the base; ALiBi has none."""
        return self.numbers if self.base == "kerple_log" else {}

    def base_bias(self, distance: Tensor) -> Tensor:
        """fp32 [H, *distance.shape], 0 at d = 0, falling. Not the hook `bias`, which attention would
        add before the network reads the scores.
        """
        if self.base == "alibi":
            return -self.slopes.view(-1, *[1] * distance.dim()) * distance.to(self.slopes.dtype)
        return log_bias(self, distance)

    def score(
        self,
        scores_BHQK: Tensor,
        distance_QK: Tensor,
        query_position_Q: Tensor,
        *,
        query_BHQD: Tensor,
        visible_QK: Tensor,
    ) -> Tensor:
        """Scores, base and network together, [B, H, Q, K]; no key or query sees another one."""
        dtype, size, batch = scores_BHQK.dtype, scores_BHQK.shape, len(scores_BHQK)
        base_HQK = self.base_bias(distance_QK).to(dtype)
        inner, offset, outer = (
            self.get_parameter(f"mlp2.{key}").to(dtype)
            for key in ("0.weight", "0.bias", "2.weight")
        )
        # One matrix a sample, 2H -> W -> H, for all places side by side. Expanded and not broadcast:
        # `matmul` would copy every place to put heads last, and back. The base's part alone is the same in
        # all samples, but a product of its own costs more than reading it again does.
        base_BHP = base_HQK.flatten(1).expand(batch, -1, -1)
        places = torch.cat([scores_BHQK.flatten(2), base_BHP], dim=1)
        hidden = torch.baddbmm(offset[:, None], inner.expand(batch, -1, -1), places)
        correction = outer.expand(batch, -1, -1).bmm(F.leaky_relu(hidden, SLOPE, inplace=True))
        return scores_BHQK + base_HQK + correction.view(size)

    @property
    def floats_per_score(self) -> int:
        """The network's width once for all heads of a place."""
        return super().floats_per_score + self.width // self.heads

    def _options(self) -> dict[str, Any]:
        return {"base": self.base, "width": self.width, **super()._options()}
