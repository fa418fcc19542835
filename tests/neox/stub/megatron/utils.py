"""The causal mask."""

import torch


def get_attn_mask(seq_length, device, sliding_window_width):
    mask = torch.ones((1, 1, seq_length, seq_length), device=device).tril()
    if sliding_window_width is not None:
        mask = mask.triu(-sliding_window_width)
    return mask < 0.5
