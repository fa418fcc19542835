"""KERPLE, added and multiplied: score * exp(-wei_a * d^wei_p) - bias_a * d^bias_p.

arXiv 2205.09921, the ablation's "bias+wht": `kerple_power` and `kerple_weight` together.
"""

from __future__ import annotations

from megatron_patches.positions.kerple_power import KerplePower
from megatron_patches.positions.kerple_weight import KerpleWeight

ALIASES = ("kerple_power_ap_ap",)


class KerplePowerWeight(KerplePower, KerpleWeight):
    """Each [H, 1, 1]: `bias_p`, `wei_p` exponents r2, r4 <= 2; `bias_a`, `wei_a` scales r1, r3."""

    numbers = {**KerplePower.numbers, **KerpleWeight.numbers}
