"""Dense attention piece by piece, recomputed in the backward: methods beyond a table of distances.

A method of tier `positional` or `content` may look at whole rows and at all heads, so neither keys nor
heads are split, only samples and queries. Not `torch.utils.checkpoint` around every piece: its outputs,
alive until the end, lie between temporary blocks that grow from piece to piece, and the C allocator
then keeps most of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatron_patches.attention.blocks import whole_rows
from megatron_patches.attention.problem import Problem, Sight, dense
from megatron_patches.positions import PositionMethod
from megatron_patches.positions._once import first_order


def recomputed(problem: Problem) -> Tensor:
    """`out_BHQD`; beside tensors of the size of q, k and v, memory has a bound of its own.

    Beyond that only the scores of a single query of a single sample, where these alone are more.
    """
    # Parameters are arguments so that the graph leads to them; `dense` reads them from the method.
    named = [(n, p) for n, p in problem.method.named_parameters() if p.requires_grad]
    out: Tensor = _Recomputed.apply(
        _Dense(problem.method, tuple(name for name, _ in named)),
        problem.scale,
        problem.sight,
        problem.q,
        problem.k,
        problem.v,
        *(parameter for _, parameter in named),
    )
    return out


class _Dense(nn.Module):
    """`dense` with the parameters that the forward had, whatever the method holds in the meantime.

    Under `torch.func.functional_call` they are other tensors than the method's own.
    """

    def __init__(self, method: PositionMethod, names: tuple[str, ...]) -> None:
        super().__init__()
        self.method, self.names = method, names

    def of(self, parameters: Sequence[Tensor]) -> Callable[[Problem, int], Tensor]:
        own = (self.method.get_parameter(name) for name in self.names)
        if all(mine is other for mine, other in zip(own, parameters, strict=True)):
            return dense
        swapped = {f"method.{n}": p for n, p in zip(self.names, parameters, strict=True)}
        return lambda problem, first_key: functional_call(self, swapped, (problem, first_key))

    def forward(self, problem: Problem, first_key: int) -> Tensor:
        return dense(problem, first_key)


def _pieces(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """Slices of samples and queries to compute together."""
    batch, heads = problem.q.shape[:2]
    samples, rows = whole_rows(batch, heads, problem.keys, problem.q.device.type)
    for sample in range(0, batch, samples):
        some = slice(sample, min(sample + samples, batch))
        for first in range(0, problem.queries, rows):
            yield some, slice(first, min(first + rows, problem.queries))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pieces: _Dense,
        scale: float,
        sight: Sight,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.pieces, ctx.parameters = pieces, parameters
        ctx.rest = (pieces.method, scale, sight)
        problem = Problem(q, k, v, *ctx.rest)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for some, rows in _pieces(problem):
            part = problem.samples(some).rows(rows.start, rows.stop)
            out[some, :, rows] = dense(part, sight.first_key(rows.start))
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        # The saved parameters are only checked for changes: an outer checkpoint hands back copies.
        q, k, v = ctx.saved_tensors[:3]
        problem, sight = Problem(q, k, v, *ctx.rest), ctx.rest[2]
        dtype, compute = problem.compute_dtype, ctx.pieces.of(ctx.parameters)
        sums = [torch.zeros_like(t, dtype=dtype) for t in (q, k, v)]
        sums += [torch.zeros_like(p) for p in ctx.parameters]
        for some, rows in _pieces(problem):
            start, end = sight.first_key(rows.start), sight.offset + rows.stop
            part = problem.samples(some).rows(rows.start, rows.stop)
            leaves = [t.detach().to(dtype).requires_grad_() for t in (part.q, part.k, part.v)]
            with torch.enable_grad():
                again = replace(part, q=leaves[0], k=leaves[1], v=leaves[2])
                out = compute(again, start)
            found = torch.autograd.grad(
                out,
                [*leaves, *ctx.parameters],
                grad_out[some, :, rows].to(dtype),
                allow_unused=True,
            )
            places = [
                sums[0][some, :, rows],
                *(t[some, :, start:end] for t in sums[1:3]),
                *sums[3:],
            ]
            for total, grad in zip(places, found, strict=True):
                if grad is not None:
                    total += grad
            del leaves, out, found, grad  # else they stay while the next piece makes its own
        inputs = (q, k, v, *ctx.parameters)
        needs = ctx.needs_input_grad[3:]
        grads = [
            total.to(t.dtype) if need else None
            for total, t, need in zip(sums, inputs, needs, strict=True)
        ]
        return (None, None, None, *grads)
