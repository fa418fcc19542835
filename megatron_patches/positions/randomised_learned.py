"""Randomised positions with a learned table: x + weight[p] at drawn places p.

Ruoss et al.: Randomized Positional Encodings Boost Length Generalization (arXiv 2305.16843).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import at_least
from megatron_patches.positions._randomised import RandomisedEmbedding
from megatron_patches.positions.learned import Learned


class RandomisedLearned(RandomisedEmbedding, Learned):
    """`weight` [span, C]: a row for every place, however long the training texts are."""

    def __init__(self, geometry: Geometry, *, span: int = 16384, **common: Any) -> None:
        at_least(self.name, "span", span, 1)  # before it is called the length of a table
        super().__init__(replace(geometry, max_length=span), span=span, **common)
