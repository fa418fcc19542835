"""No position signal: only the causal mask tells positions apart.

Haviv et al.: Transformer Language Models without Positional Encodings Still Learn Positional
Information (arXiv 2203.16634).
"""

from __future__ import annotations

from megatron_patches.positions._base import PositionMethod


class NoPosition(PositionMethod):
    """Every hook does nothing. Both precisions are the same."""

    precisions = ("exact", "as_published")
