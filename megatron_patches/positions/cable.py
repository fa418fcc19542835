"""CABLE: a bias that every token adds to, by softplus of a linear map of the layer's input.

Veisi et al.: Context-aware Biases for Length Extrapolation (arXiv 2503.08067). `form` "released" is the
authors' code, which does not divide scores by the square root of the head size; that apart it is FoX
with the sign of the gate's input turned, as -softplus(y) = log sigmoid(-y). "weighted" is the formula of
the later paper, for which no code is public. As printed there it grows with the distance, against the
paper's own words (a penalty); here it has the minus sign. Its kernel variant, -log(B^2 + 1), is no sum
over tokens and is left out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patches.positions._gated import Gated
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import choice

FORMS = ("released", "weighted", "unweighted")


class Cable(Gated):
    """Log decay of token l: -softplus(decay_weight[h] . x_l + decay_bias[h]), or -relu without a bias.

    `decay_weight` [H, C], `decay_bias` [H] ("released" only), `gain_weight` [H, C] ("weighted" only).

    Options: `form`, "released"; "weighted": relu, and query i's sums are multiplied by
    softplus(gain_weight[h] . x_i); "unweighted": relu alone, the paper's CABLE_NW.
    """

    def __init__(self, geometry: Geometry, *, form: str = "released", **common: Any) -> None:
        super().__init__(geometry, **common)
        choice("cable", "form", form, FORMS)
        self.form = form
        if form == "released":
            self.score_scale = 1.0
        generator = torch.Generator().manual_seed(geometry.seed)
        self.add_map("decay", bias=form == "released", generator=generator)
        if form == "weighted":
            self.add_map("gain", bias=False, generator=generator)

    def decay(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """fp32 log decays [B, H, L], none above 0, and gains [B, H, L] or None, from [B, L, C]."""
        logits = self.mapped("decay", hidden)
        if self.form == "released":
            return -F.softplus(logits), None
        gain = F.softplus(self.mapped("gain", hidden)) if self.form == "weighted" else None
        return -F.relu(logits), gain

    def _options(self) -> dict[str, Any]:
        return {"form": self.form, **super()._options()}
