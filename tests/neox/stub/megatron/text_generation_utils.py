"""Imports the mask by name, as several modules do."""

from megatron.utils import get_attn_mask

__all__ = ["get_attn_mask"]
