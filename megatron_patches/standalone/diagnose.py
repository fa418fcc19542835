"""Why a loss is not a number."""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.standalone.model import GPT


class TrainingError(RuntimeError):
    """The run cannot go on: a loss or a tensor is not finite."""


def first_cause(model: GPT, text: torch.Tensor | None) -> str:
    """Name the first tensor that is not finite: parameter, gradient, or output of a module.

    `text` [B, L + 1] is read once more to look at the modules; None where that is impossible.
    """
    for name, parameter in model.named_parameters():
        # ZeRO 3 keeps a slice of each on every rank.
        if not torch.isfinite(getattr(parameter, "ds_tensor", parameter)).all():
            return f"parameter {name} holds NaN or infinity"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"the gradient of {name} holds NaN or infinity"
    if text is None:
        return "no parameter or gradient is the cause; lower the learning rate"
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and not torch.isfinite(output).all():
                found.append(name)

        return hook

    hooks = [m.register_forward_hook(look(n)) for n, m in model.named_modules() if n]
    with torch.no_grad():
        model(text[:, :-1], text[:, 1:])
    for handle in hooks:
        handle.remove()
    return f"first in the output of {found[0]}" if found else "only the loss itself"
