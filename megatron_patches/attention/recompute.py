"""Dense attention chunk by chunk, recomputed in the backward: methods beyond a table of distances.

A method of tier `positional` or `content` may look at whole rows and at all heads, so neither keys nor
heads are split. Not `torch.utils.checkpoint` around every chunk: its outputs, alive until the end, lie
between temporary blocks that grow from chunk to chunk, and the C allocator then keeps most of those.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_patches.attention.problem import Problem, Sight, dense
from megatron_patches.positions import PositionMethod


def recomputed(problem: Problem, chunk: int) -> Tensor:
    """`out_BHQD`, `chunk` queries at a time; memory grows with chunk x keys."""
    # Parameters are arguments so that the graph leads to them; `dense` reads them from the method.
    parameters = [p for p in problem.method.parameters() if p.requires_grad]
    out: Tensor = _Recomputed.apply(
        problem.method,
        problem.scale,
        problem.sight,
        chunk,
        problem.q,
        problem.k,
        problem.v,
        *parameters,
    )
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        method: PositionMethod,
        scale: float,
        sight: Sight,
        chunk: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.rest, ctx.chunk, ctx.parameters = (method, scale, sight), chunk, parameters
        problem = Problem(q, k, v, *ctx.rest)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for first in range(0, problem.queries, chunk):
            last = min(first + chunk, problem.queries)
            out[:, :, first:last] = dense(problem.rows(first, last), sight.first_key(first))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        # The saved parameters are only checked for changes: an outer checkpoint hands back copies.
        q, k, v = ctx.saved_tensors[:3]
        problem, sight = Problem(q, k, v, *ctx.rest), ctx.rest[2]
        dtype = problem.compute_dtype
        sums = [torch.zeros_like(t, dtype=dtype) for t in (q, k, v)]
        sums += [torch.zeros_like(p) for p in ctx.parameters]
        for first in range(0, problem.queries, ctx.chunk):
            last = min(first + ctx.chunk, problem.queries)
            start, end = sight.first_key(first), sight.offset + last
            part = problem.rows(first, last)
            leaves = [t.detach().to(dtype).requires_grad_() for t in (part.q, part.k, part.v)]
            with torch.enable_grad():
                out = dense(replace(part, q=leaves[0], k=leaves[1], v=leaves[2]), start)
            found = torch.autograd.grad(
                out,
                [*leaves, *ctx.parameters],
                grad_out[:, :, first:last].to(dtype),
                allow_unused=True,
            )
            rows, keys = slice(first, last), slice(start, end)
            places = [sums[0][:, :, rows], sums[1][:, :, keys], sums[2][:, :, keys], *sums[3:]]
            for total, grad in zip(places, found, strict=True):
                if grad is not None:
                    total += grad
        inputs = (q, k, v, *ctx.parameters)
        needs = ctx.needs_input_grad[4:]
        grads = [
            total.to(t.dtype) if need else None
            for total, t, need in zip(sums, inputs, needs, strict=True)
        ]
        return (None, None, None, None, *grads)
