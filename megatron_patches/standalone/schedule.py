"""What happens at which step: GPT-NeoX's learning rate, and when something is due."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_patches.config import Config


def learning_rate(config: Config, step: int) -> float:
    """The rate used by update number `step` (0-based).

    Warm-up rises linearly over `warmup * lr_decay_iters` updates; as in NeoX its first update already
    uses the rate of the second. Afterwards `lr_decay_style` leads down to `min_lr`.
    """
    peak = config.optimizer.params.lr
    end = config.lr_decay_iters
    # NeoX counts updates done, so its update 0 runs at n = 0; a fraction of an iteration is kept.
    warm = config.warmup * end
    if warm > 0 and step <= warm:
        # NeoX lets a warm-up of less than one update start above the peak; that is not wanted.
        return peak * max(1, step) / max(1.0, warm)
    done, span = step - warm, max(end - warm, 1e-9)
    done = min(done, span)  # past lr_decay_iters the floor holds; NeoX's cosine would rise again
    if config.lr_decay_style == "linear":
        rate = peak * (span - done) / span
    elif config.lr_decay_style == "cosine":
        rate = config.min_lr + (peak - config.min_lr) / 2 * (math.cos(math.pi * done / span) + 1)
    elif config.lr_decay_style == "exponential":
        rate = peak * math.exp(-0.693 * done / span)  # NeoX's constant for one halving
    else:
        rate = peak
    return max(rate, config.min_lr)


def due(config: Config, interval: int, step: int) -> bool:
    """Whether something that happens every `interval` steps, and at the end, happens after `step`."""
    return step % interval == 0 or step == config.train_iters


def save_due(config: Config, step: int) -> bool:
    """NeoX's rule for checkpoints: every `checkpoint_factor` steps, or at its powers, and as listed."""
    if step == config.train_iters or step in (config.extra_save_iters or ()):
        return True
    if config.checkpoint_factor is None:
        return False
    if config.checkpoint_scale == "log":
        level = round(math.log(step, config.checkpoint_factor))
        return step == int(config.checkpoint_factor**level)
    return due(config, int(config.checkpoint_factor), step)
