"""Backwards written by hand: for first derivatives, in the number formats of their forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
Backward = Callable[..., Gradients]


def exact(device_type: str) -> AbstractContextManager[Any]:
    """Within it autocast rounds nothing."""
    if not torch.amp.is_autocast_available(device_type):  # the meta device
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def first_order(backward: Backward) -> Backward:
    """`backward(ctx, grad)` of an autograd function, without autocast; its gradients are not differentiable.

    Differentiating them raises RuntimeError. torch's own `once_differentiable` does that only where
    `grad` needs a gradient; where it is a constant, the second derivatives through the saved tensors
    would be missing without a word.
    """

    @wraps(backward)
    def wrapped(ctx: Any, grad: Tensor) -> Gradients:
        with torch.no_grad(), exact(grad.device.type):
            found = backward(ctx, grad)
        if not torch.is_grad_enabled():
            return found
        sources = [t for t in (grad, *ctx.saved_tensors) if t is not None and t.requires_grad]
        if not sources:
            return found
        return tuple(None if part is None else _NoSecond.apply(part, *sources) for part in found)

    return wrapped


class _NoSecond(torch.autograd.Function):
    """The first argument, as a function of the others that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, *sources: Tensor) -> Tensor:
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        raise RuntimeError(
            "this attention has first derivatives only: attend(..., impl='reference') with a method of "
            "plain operations can be differentiated again"
        )
