"""KERPLE-log at randomised distances: -bias_p * log(1 + bias_a * s_d), where s_1 < s_2 < ... are drawn.

The kernel of arXiv 2205.09921 with the distances of Ruoss et al. (arXiv 2305.16843), who did not try it.
"""

from __future__ import annotations

from megatron_patches.positions._randomised import RandomisedDistances
from megatron_patches.positions.kerple_log import KerpleLog


class RandomisedKerpleLog(RandomisedDistances, KerpleLog):
    """`bias_p`, `bias_a` [H, 1, 1], and one draw for all layers, as the kernel is shared by them."""

    precisions = ("exact",)
