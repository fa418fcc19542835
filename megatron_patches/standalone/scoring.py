"""Losses of windows of text under a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.windows import Window, batches

TOKENS_PER_PASS = 4096  # windows are batched up to this many tokens unless told otherwise
POSITION_BINS = 64


@dataclass(frozen=True)
class Score:
    """Losses in nats of one length: `windows` [windows] means, `positions` mean by position bin."""

    windows: list[float]
    counts: list[int]
    positions: list[float] | None
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def loss(self) -> float:
        return float(np.dot(self.windows, self.counts) / self.tokens)


def score(
    model: GPT,
    tokens: np.ndarray,
    windows: Sequence[Window],
    *,
    batch_size: int | None = None,
    by_position: bool = False,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Score:
    """Run `model` over `windows` of `tokens` (int `[T]`); float32 losses, summed in float64.

    Raises ValueError when the model cannot read windows this long, FloatingPointError when a loss
    is not finite.
    """
    length = windows[0].length
    model.position_method.can_read(length)
    size = batch_size or max(1, TOKENS_PER_PASS // length)
    device = next(model.parameters()).device
    means: list[float] = []
    sums_L = np.zeros(length) if by_position else None
    begun = time.perf_counter()
    for group in batches(windows, size):
        ids = np.stack([tokens[w.start : w.start + length + 1] for w in group]).astype(np.int64)
        text = torch.from_numpy(ids).to(device)
        losses = model.token_losses(text[:, :-1], text[:, 1:], first=group[0].score_from)
        values = losses.double().cpu().numpy()
        if not np.isfinite(values).all():
            raise FloatingPointError(
                f"the loss of the window at token {group[0].start} is not finite"
            )
        means += values.mean(axis=1).tolist()
        if sums_L is not None:
            sums_L += values.sum(axis=0)
        advance(len(group) * length)
    positions = None
    if sums_L is not None:
        bins = next(b for b in range(min(POSITION_BINS, length), 0, -1) if length % b == 0)
        positions = (sums_L / len(windows)).reshape(bins, -1).mean(axis=1).tolist()
    counts = [window.scored for window in windows]
    return Score(means, counts, positions, time.perf_counter() - begun)
