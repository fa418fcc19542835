"""FoX, the forgetting transformer: every token lets older keys fade by a factor that it chooses itself.

Lin et al.: Forgetting Transformer: Softmax Attention with a Forget Gate (arXiv 2503.02130), section 3;
start values as in the authors' code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patches.positions._gated import Gated
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import choice, finite

KINDS = ("data", "learned", "fixed")
SHORTEST = 1e-30  # its slope and the sums of many of them are numbers of float32


class Fox(Gated):
    """Log decay of token l: log sigmoid(fgate_weight[h] . x_l + fgate_bias[h]).

    Options:
        gates: "data": as above, `fgate_weight` [H, C] and `fgate_bias` [H], at first 1/2 for every
            token; "learned": `fgate_bias` alone, the same for every token; "fixed": no parameters.
        shortest, longest: tokens after which a head of the latter two has faded to 1/e at first, spread
            over the heads in equal ratios. Fixed gates are ALiBi with slopes 1 / time.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        gates: str = "data",
        shortest: float = 2.0,
        longest: float = 128.0,
        **common: Any,
    ) -> None:
        super().__init__(geometry, **common)
        choice("fox", "gates", gates, KINDS)
        finite("fox", "shortest", shortest)
        finite("fox", "longest", longest)
        if not SHORTEST <= shortest <= longest:
            raise ValueError(
                f"fox: {SHORTEST:g} <= shortest <= longest must hold, not shortest={shortest}, "
                f"longest={longest}"
            )
        self.gates, self.shortest, self.longest = gates, float(shortest), float(longest)
        if gates == "data":
            generator = torch.Generator().manual_seed(geometry.seed)
            self.add_map("fgate", bias=True, generator=generator)
        elif gates == "learned":
            self._add("fgate_bias", self._start().float())

    def _start(self) -> Tensor:
        """float64 [heads]: the biases whose gates are exp(-1 / time)."""
        low, high = math.log(self.shortest), math.log(self.longest)
        times = torch.linspace(low, high, self.heads, device="cpu", dtype=torch.float64).exp()
        slopes = 1 / times
        # -log(e^s - 1), which is -s to the last digit long before e^s leaves float64.
        return -torch.where(slopes < 100, torch.expm1(slopes).log(), slopes)

    def decay(self, hidden: Tensor) -> tuple[Tensor, None]:
        """fp32 log decays [B, H, L], all below 0, from [B, L, C]."""
        if self.gates == "data":
            return F.logsigmoid(self.mapped("fgate", hidden)), None
        if self.gates == "learned":
            decay = self.result(F.logsigmoid(self.get_parameter("fgate_bias")))
        else:
            owned = slice(self.first_head, self.first_head + self.owned_heads)
            exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            decay = F.logsigmoid(self._start()[owned]).to(hidden.device, exact)
        return decay[None, :, None].expand(hidden.shape[0], -1, hidden.shape[1]), None

    def _options(self) -> dict[str, Any]:
        return {
            "gates": self.gates,
            "shortest": self.shortest,
            "longest": self.longest,
            **super()._options(),
        }
