"""An update that DeepSpeed takes before training, and how to take it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def forget_first_update(optimizer: Any) -> None:
    """DeepSpeed may take a first update with zero gradients, to allocate Adam's moments.

    Adam counts it, which shrinks the first real updates (to 0.74 of their size for betas 0.9 and
    0.95); with a learning rate it would also decay the weights once.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    # torch counts in tensors, DeepSpeed's fused Adam in integers, apex in the group.
    for counted in (*inner.state.values(), *inner.param_groups):
        if isinstance(counted.get("step"), torch.Tensor):
            counted["step"].zero_()
        elif "step" in counted:
            counted["step"] = 0


@contextmanager
def without_rate(optimizer: Any) -> Iterator[None]:
    """The optimizer's learning rates are 0 inside, so that an update changes no weight."""
    groups = list(optimizer.param_groups)
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
