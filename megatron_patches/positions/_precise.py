"""In which dtype a position method stores its numbers and computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

Itself = TypeVar("Itself", bound="Precise")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precise(nn.Module):
    """Floating parameters and buffers stay in fp32 whatever dtype the model is cast to."""

    name: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]] = ("exact",)

    precision: str
    published_dtype: torch.dtype | None  # of "as_published"; None: exact

    def choose_precision(self, precision: str, model_dtype: str | torch.dtype | None) -> None:
        """Set `precision` and `published_dtype`. Raises ValueError for what the method does not have."""
        if precision not in self.precisions:
            raise ValueError(
                f"{self.name} has no precision={precision!r}; it has: {', '.join(self.precisions)}"
            )
        if isinstance(model_dtype, str) and model_dtype in DTYPES:
            model_dtype = DTYPES[model_dtype]
        if model_dtype is not None and model_dtype not in DTYPES.values():
            raise ValueError(f"{self.name}: model_dtype={model_dtype!r} is none of {list(DTYPES)}")
        self.precision, self.published_dtype = precision, None
        if precision != "exact":
            if not isinstance(model_dtype, torch.dtype):
                raise ValueError(f"{self.name}: precision={precision!r} needs model_dtype as well")
            self.published_dtype = model_dtype

    def working_dtype(self, parameter: Tensor) -> torch.dtype:
        """The dtype to compute in: the published one, else fp32, else float64 if stored so."""
        if self.published_dtype is not None:
            return self.published_dtype
        return torch.float64 if parameter.dtype == torch.float64 else torch.float32

    @staticmethod
    def result(values: Tensor) -> Tensor:
        """A computed bias or weight in the contract's dtype: fp32, or float64 if computed so."""
        return values if values.dtype == torch.float64 else values.float()

    def to_float64_(self: Itself) -> Itself:
        """Store floating tensors in float64; all maths follows. For gradient checks."""
        super()._apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        return self

    def _apply(self: Itself, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Itself:
        # Every cast and move of nn.Module comes through here: follow moves, ignore casts, except
        # that a tensor which somebody made low precision behind our back may return to fp32.
        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if not tensor.is_floating_point() or moved.dtype == tensor.dtype:
                return moved
            raised = moved.dtype == torch.float32 and tensor.dtype != torch.float64
            return moved if raised else tensor.to(moved.device)

        super()._apply(move_only, recurse)
        return self
