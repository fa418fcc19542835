"""Randomised positions in the sinusoidal embedding: x + [sin(p * f), cos(p * f)] at drawn places p.

Ruoss et al.: Randomized Positional Encodings Boost Length Generalization (arXiv 2305.16843).
"""

from __future__ import annotations

from megatron_patches.positions._randomised import RandomisedEmbedding
from megatron_patches.positions.sinusoidal import Sinusoidal


class RandomisedSinusoidal(RandomisedEmbedding, Sinusoidal):
    """Saves what both save; learns nothing."""
