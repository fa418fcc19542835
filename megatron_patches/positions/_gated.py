"""What methods with data-dependent gates share: a linear map from the layer's input to heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_patches.positions._base import PositionMethod

SPREAD = (
    0.02  # standard deviation of the weights at the start, in the public codes of FoX and CABLE
)


class Gated(PositionMethod):
    """A base: `PREFIX_weight` [H, C] and, if wanted, `PREFIX_bias` [H] for each of its maps."""

    tier = "content"
    module_name = "rpe"
    sharing = "layer"

    def add_map(self, prefix: str, *, bias: bool, generator: torch.Generator) -> None:
        """Weights from N(0, 0.02^2), drawn for all heads before the cut, and biases of 0."""
        size = (self.heads, self.geometry.hidden_size)
        every = torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
        self._add(f"{prefix}_weight", every * SPREAD)
        if bias:
            self._add(f"{prefix}_bias", torch.zeros(self.heads, device="cpu", dtype=torch.float32))

    def _add(self, key: str, every: Tensor) -> None:
        owned = every[self.first_head : self.first_head + self.owned_heads].clone()
        self.register_parameter(key, nn.Parameter(owned.to(torch.get_default_device())))
        self.head_dim_of[key] = 0

    def mapped(self, prefix: str, hidden: Tensor) -> Tensor:
        """fp32 [B, H, L] from [B, L, C], whatever the dtype of `hidden` and also under autocast."""
        weight = self.get_parameter(f"{prefix}_weight")
        bias = self._parameters.get(f"{prefix}_bias")
        dtype = self.working_dtype(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            values = F.linear(
                hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            )
        return self.result(values.movedim(-1, 1))
