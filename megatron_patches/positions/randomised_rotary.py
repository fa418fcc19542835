"""Randomised positions in the rotary embedding: queries and keys turned by angles of drawn places.

Ruoss et al.: Randomized Positional Encodings Boost Length Generalization (arXiv 2305.16843).
"""

from __future__ import annotations

from torch import Tensor

from megatron_patches.positions._randomised import RandomisedPlaces
from megatron_patches.positions._rotation import Rotation


class RandomisedRotary(RandomisedPlaces, Rotation):
    """Learns nothing. Each layer has draws of its own, as in the authors' code.

    A cache keeps raw keys, for places are counted from the first token that is no padding.
    """

    module_name = "rotary_emb"
    sharing = "layer"
    cache = "raw"

    def transform(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        *,
        hidden: Tensor | None = None,
        total_length: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q and k [B, H, L, D] turned by the places of `positions`; shape and dtype are kept.

        Raises ValueError without a total length, planned or given.
        """
        cos, sin = self.rotation(self.places(positions.to(q.device), total_length), q.dtype)
        return self.turn(q, cos, sin), self.turn(k, cos, sin)
