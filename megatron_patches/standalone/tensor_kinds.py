"""Which tensors of a file that others wrote can be weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def unusable(value: Any) -> str | None:
    """Why `value` cannot be copied into a model as it is; None: it can.

    Other kinds of numbers would be rounded without a word, or fail in the first step that lacks them.
    """
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.layout != torch.strided or value.is_quantized:
        return "sparse or quantised"
    if value.device.type != "cpu":
        return f"on the device {value.device.type}"
    if value.dtype not in KINDS:
        return str(value.dtype).removeprefix("torch.")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return "more numbers than are stored"  # one, repeated: a small file would fill the memory
    return None if value.dim() else "a single number"


def stored_numbers(tensors: Iterable[Tensor]) -> int:
    """How many numbers are stored for them: what several tensors share counts once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if not unusable(tensor):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
    return sum(found.values())
