"""The ways of computing attention that `bench_attention.py` compares, and their float64 oracle.

Shape suffixes: B batch, H heads, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.positions import PositionMethod, build

HEADS, HEAD_DIM = 12, 64
WHOLE = 1024  # up to this length the oracle computes every row, beyond it two blocks of BLOCK
BLOCK = 128
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
# The authors' way and dense masks round scores or biases to bfloat16; ours and SDPA do not.
ROUNDED_TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 8e-2}


@dataclass
class Inputs:
    """`q`, `k`, `v` [1, H, L, D] with the method that belongs to them."""

    q: Tensor
    k: Tensor
    v: Tensor
    method: PositionMethod

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.method.parameters()]


Variant = Callable[[Inputs], Tensor]


def make_inputs(name: str, length: int, dtype: torch.dtype, training: bool) -> Inputs:
    generator = torch.Generator().manual_seed(length)
    size = (1, HEADS, length, HEAD_DIM)
    q, k, v = (torch.randn(size, generator=generator).to(dtype) for _ in range(3))
    method = build(name, heads=HEADS, head_dim=HEAD_DIM, hidden_size=HEADS * HEAD_DIM, seed=1)
    for tensor in (q, k, v):
        tensor.requires_grad_(training)
    return Inputs(q, k, v, method.requires_grad_(training))


def chunked(x: Inputs) -> Tensor:
    return attend(x.q, x.k, x.v, x.method, impl="chunked")


def sdpa(x: Inputs) -> Tensor:
    """Without any bias: the limit."""
    return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)


@lru_cache(maxsize=1)
def _distances(length: int) -> tuple[Tensor, Tensor]:
    """Distances and the mask of the future; the released code keeps both from call to call, too."""
    position_L = torch.arange(length)
    distance_QK = (position_L[:, None] - position_L[None, :]).clamp(min=0).float()
    return distance_QK, torch.ones(length, length, dtype=torch.bool).triu_(1)


def authors(x: Inputs) -> Tensor:
    """The released code's steps, in each layer: a dense bias, its sum, -10000 for the future.

    The bias itself is rounded to the model's dtype, not the distances: it would be another function.
    """
    length = x.length
    distance_QK, future = _distances(length)
    scores = torch.baddbmm(
        torch.empty(HEADS, length, length, dtype=x.q.dtype),
        x.q.flatten(0, 1),
        x.k.flatten(0, 1).transpose(1, 2),
        beta=0.0,
        alpha=1 / math.sqrt(HEAD_DIM),
    )
    bias = x.method.bias(distance_QK)
    assert bias is not None
    scores = scores + bias.to(scores.dtype)
    probabilities = torch.softmax(scores.masked_fill(future, -10000.0), dim=-1)
    return torch.bmm(probabilities, x.v.flatten(0, 1)).view_as(x.q)


def dense_mask(x: Inputs) -> Tensor:
    """`[H, L, L]` with -inf for the future, in the dtype of the queries."""
    table_HL = x.method.table(x.length)
    assert table_HL is not None
    distance_QK = torch.arange(x.length)[:, None] - torch.arange(x.length)[None, :]
    bias = table_HL[:, distance_QK.clamp(min=0)]
    return bias.masked_fill(distance_QK < 0, float("-inf")).to(x.q.dtype)


def dense(x: Inputs) -> Variant:
    """SDPA with a mask built beforehand; in training a learned bias needs a new one each time."""
    if any(p.requires_grad for p in x.method.parameters()):
        return lambda x: F.scaled_dot_product_attention(
            x.q, x.k, x.v, attn_mask=dense_mask(x)[None]
        )
    mask = dense_mask(x)[None]
    return lambda x: F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=mask)


VARIANTS: dict[str, Callable[[Inputs], Variant]] = {
    "chunked": lambda x: chunked,
    "sdpa": lambda x: sdpa,
    "authors": lambda x: authors,
    "dense": dense,
}


def needed_bytes(variant: str, length: int, dtype: torch.dtype, training: bool) -> int:
    """A rough upper bound of what a variant takes; the dense ones hold several [H, L, L]."""
    if variant in ("chunked", "sdpa"):
        return 0
    held = 5 if training else 3
    # The dense bias and its mask are float32 before they are rounded.
    return held * HEADS * length * length * 4


def gradients(x: Inputs, out: Tensor, grad_out: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(out, x.leaves(), grad_out, allow_unused=True))


def blocks(length: int) -> list[tuple[int, int]]:
    if length <= WHOLE:
        return [(0, length)]
    return [(length // 2, length // 2 + BLOCK), (length - BLOCK, length)]


class Oracle:
    """float64 outputs and gradients of the checked rows, with and without the method."""

    def __init__(self, x: Inputs, training: bool) -> None:
        self.x, self.training, self.rows = x, training, blocks(x.length)
        generator = torch.Generator().manual_seed(3)
        self.grad_out = torch.zeros_like(x.q)
        for first, last in self.rows:
            part = self.grad_out[:, :, first:last]
            part.copy_(torch.randn(part.shape, generator=generator))
        none = build("none", heads=HEADS, head_dim=HEAD_DIM, hidden_size=HEADS * HEAD_DIM)
        self._found = {name: self._compute(m) for name, m in (("", x.method), ("sdpa", none))}

    def _compute(self, method: PositionMethod) -> tuple[Tensor, list[Tensor | None]]:
        x = self.x
        leaves = [t.detach().double().requires_grad_(self.training) for t in (x.q, x.k, x.v)]
        parameters = list(method.parameters()) if self.training else []
        outs, sums = [], [torch.zeros_like(t) for t in (*leaves, *parameters)]
        for first, last in self.rows:
            q, k, v = leaves
            part = q[:, :, first:last], k[:, :, :last], v[:, :, :last]
            out = attend(*part, method, impl="reference", query_offset=first)
            outs.append(out.detach())
            if self.training:
                wanted = [*leaves, *parameters]
                upstream = self.grad_out[:, :, first:last].double()
                for total, grad in zip(
                    sums, torch.autograd.grad(out, wanted, upstream), strict=True
                ):
                    total += grad
        return torch.cat(outs, dim=2), list(sums)

    def error(self, variant: str, work: Variant) -> float:
        """Largest relative error of the outputs and (training) of every gradient."""
        expected, grads = self._found["sdpa" if variant == "sdpa" else ""]
        out = work(self.x)
        rows = torch.cat([out.detach()[:, :, first:last] for first, last in self.rows], dim=2)
        worst = _relative(rows, expected)
        if self.training:
            found = gradients(self.x, out, self.grad_out)
            for ours, theirs in zip(found, grads, strict=False):
                if ours is not None:
                    worst = max(worst, _relative(ours, theirs))
        return worst

    def check(self, variant: str, work: Variant) -> float:
        """The error; raises ValueError where it is too large for a comparison of times."""
        error, dtype = self.error(variant, work), self.x.q.dtype
        rounded = variant in ("authors", "dense")
        limit = (ROUNDED_TOLERANCE if rounded else TOLERANCE)[dtype]
        if not error <= limit:
            raise ValueError(
                f"{variant} with {self.x.method.name} at {self.x.length} in {dtype} is off by "
                f"{error:.2g} (allowed {limit:.2g}): no time is compared with a wrong result"
            )
        return error


def _relative(found: Tensor, expected: Tensor | None) -> float:
    assert expected is not None
    return float((found.double() - expected).norm() / expected.norm())
