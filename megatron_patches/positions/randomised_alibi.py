"""ALiBi at randomised distances: -slope * s_d, where s_1 < s_2 < ... are drawn.

Ruoss et al.: Randomized Positional Encodings Boost Length Generalization (arXiv 2305.16843). Their models
look both ways and tell the past by -slope * (s_d - 0.5); the half is a constant to causal attention but for
d = 0, and left out.
"""

from __future__ import annotations

from megatron_patches.positions._randomised import RandomisedDistances
from megatron_patches.positions.alibi import Alibi


class RandomisedAlibi(RandomisedDistances, Alibi):
    """Learns nothing. Each layer has draws of its own."""

    sharing = "layer"
    precisions = ("exact",)
