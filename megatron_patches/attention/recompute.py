"""Attention piece by piece, recomputed in the backward: methods beyond a table of distances.

A method of tier `positional` or `content` may look at whole rows and at all heads, so neither keys nor
heads are split, only samples and queries. Products with keys and values take many queries at once;
what the method makes of them goes a few rows at a time, which stay in the cache. Only this in between
is left to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatron_patches.attention.blocks import rows_worked_on, whole_rows
from megatron_patches.attention.problem import Problem, Sight, weights
from megatron_patches.positions import PositionMethod
from megatron_patches.positions._once import first_order

# (rows of the problem, their scores, position of their first key) -> their weights
Weights = Callable[[Problem, Tensor, int], Tensor]


def recomputed(problem: Problem) -> Tensor:
    """`out_BHQD`; beside tensors of the size of q, k and v, memory has a bound of its own.

    Beyond that only the scores of a single query of a single sample, where these alone are more.
    """
    problem = problem.without_padding_values()
    # Parameters are arguments so that the graph leads to them; `weights` reads them from the method.
    named = [(n, p) for n, p in problem.method.named_parameters() if p.requires_grad]
    out: Tensor = _Recomputed.apply(
        _Weights(problem.method, tuple(name for name, _ in named)),
        problem.scale,
        problem.sight,
        problem.q,
        problem.k,
        problem.v,
        *(parameter for _, parameter in named),
    )
    return out


class _Weights(nn.Module):
    """`weights` with the parameters that the forward had, whatever the method holds in the meantime.

    Under `torch.func.functional_call` they are other tensors than the method's own.
    """

    def __init__(self, method: PositionMethod, names: tuple[str, ...]) -> None:
        super().__init__()
        self.method, self.names = method, names

    def of(self, parameters: Sequence[Tensor]) -> Weights:
        own = (self.method.get_parameter(name) for name in self.names)
        if all(mine is other for mine, other in zip(own, parameters, strict=True)):
            return weights
        swapped = {f"method.{n}": p for n, p in zip(self.names, parameters, strict=True)}
        return lambda *arguments: functional_call(self, swapped, arguments)

    def forward(self, problem: Problem, scores: Tensor, first_key: int) -> Tensor:
        return weights(problem, scores, first_key)


class _Rows(NamedTuple):
    """Queries, and the keys that at least one of them sees."""

    queries: slice
    keys: slice

    def of(self, products_BHRK: Tensor, piece: _Rows) -> Tensor:
        """Their part of the products of a piece that they lie in, a view."""
        lines = _shift(self.queries, piece.queries.start)
        return products_BHRK[:, :, lines, _shift(self.keys, piece.keys.start)]

    def put(self, values: Tensor, products_BHRK: Tensor, piece: _Rows) -> None:
        """Writes there, and 0 where these queries see no key but others of the piece do."""
        lines = products_BHRK[:, :, _shift(self.queries, piece.queries.start)]
        keys = _shift(self.keys, piece.keys.start)
        lines[..., : keys.start] = 0
        lines[..., keys] = values
        lines[..., keys.stop :] = 0


def _shift(some: slice, by: int) -> slice:
    return slice(some.start - by, some.stop - by)


def _rows(sight: Sight, queries: slice, count: int) -> Iterator[_Rows]:
    """`count` queries at a time."""
    for first in range(queries.start, queries.stop, count):
        last = min(first + count, queries.stop)
        yield _Rows(slice(first, last), slice(sight.first_key(first), sight.offset + last))


class _Samples:
    """Samples whose products are taken together, their heads behind them in one dimension N."""

    def __init__(self, problem: Problem, rows: int) -> None:
        self.problem, self.rows = problem, rows
        # Once and not in every product, which would copy keys that do not lie side by side.
        self.k_NKD, self.v_NKD = (self.flat(t).contiguous() for t in (problem.k, problem.v))

    def flat(self, t: Tensor) -> Tensor:
        """`[B, H, ...]` -> `[N, ...]` in the dtype of the computation."""
        return t.to(self.problem.compute_dtype).reshape(-1, *t.shape[2:])

    def pieces(self) -> Iterator[_Rows]:
        return _rows(self.problem.sight, slice(0, self.problem.queries), self.rows)

    def parts(self, piece: _Rows) -> Iterator[_Rows]:
        batch, heads = self.problem.q.shape[:2]
        row = batch * heads * (piece.keys.stop - piece.keys.start)
        kept, device = self.problem.method.floats_per_score, self.problem.q.device.type
        count = rows_worked_on(row, kept, self.rows, device)
        return _rows(self.problem.sight, piece.queries, count)

    def products(self, rows_NRD: Tensor, keys_NKD: Tensor) -> Tensor:
        """Of each row with each key or value, `[B, H, R, K]`."""
        product = torch.bmm(rows_NRD, keys_NKD.transpose(1, 2))
        return product.view(*self.problem.q.shape[:2], *product.shape[1:])


def _together(problem: Problem) -> Iterator[tuple[slice, _Samples]]:
    batch, heads = problem.q.shape[:2]
    count, rows = whole_rows(batch, heads, problem.keys, problem.q.device.type)
    for first in range(0, batch, count):
        some = slice(first, min(first + count, batch))
        yield some, _Samples(problem.samples(some), rows)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        swapped: _Weights,
        scale: float,
        sight: Sight,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.swapped, ctx.parameters = swapped, parameters
        ctx.rest = (swapped.method, scale, sight)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for some, samples in _together(Problem(q, k, v, *ctx.rest)):
            for piece in samples.pieces():
                q_NRD = samples.flat(samples.problem.q[:, :, piece.queries])
                scores = samples.products(q_NRD, samples.k_NKD[:, piece.keys]).mul_(scale)
                for part in samples.parts(piece):
                    rows = samples.problem.rows(part.queries.start, part.queries.stop)
                    p = weights(rows, part.of(scores, piece), part.keys.start)
                    part.put(p, scores, piece)
                block_NRD = torch.bmm(scores.flatten(0, 1), samples.v_NKD[:, piece.keys])
                out[some, :, piece.queries] = block_NRD.view_as(out[some, :, piece.queries])
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        # The saved parameters are only checked for changes: an outer checkpoint hands back copies.
        q, k, v = ctx.saved_tensors[:3]
        compute, scale = ctx.swapped.of(ctx.parameters), ctx.rest[1]
        grads = [torch.empty_like(t) for t in (q, k, v)]
        sums = [torch.zeros_like(p) for p in ctx.parameters]
        for some, samples in _together(Problem(q, k, v, *ctx.rest)):
            sum_k, sum_v = torch.zeros_like(samples.k_NKD), torch.zeros_like(samples.v_NKD)
            for piece in samples.pieces():
                q_NRD = samples.flat(samples.problem.q[:, :, piece.queries])
                grad_NRD = samples.flat(grad_out[some, :, piece.queries])
                keys_NKD = samples.k_NKD[:, piece.keys]
                p = samples.products(q_NRD, keys_NKD).mul_(scale)
                grad_s = samples.products(grad_NRD, samples.v_NKD[:, piece.keys])
                direct_NRD = _through_rows(
                    samples, piece, p, grad_s, q_NRD, compute, ctx.parameters, sums
                )
                p_NRK, grad_s_NRK = p.flatten(0, 1), grad_s.flatten(0, 1)
                sum_v[:, piece.keys].baddbmm_(p_NRK.transpose(1, 2), grad_NRD)
                sum_k[:, piece.keys].baddbmm_(grad_s_NRK.transpose(1, 2), q_NRD, alpha=scale)
                grad_NRD = torch.baddbmm(direct_NRD, grad_s_NRK, keys_NKD, alpha=scale)
                grads[0][some, :, piece.queries] = grad_NRD.view_as(q[some, :, piece.queries])
            grads[1][some] = sum_k.view_as(k[some])
            grads[2][some] = sum_v.view_as(v[some])
        needs = ctx.needs_input_grad[3:]
        wanted = (g if need else None for g, need in zip([*grads, *sums], needs, strict=True))
        return (None, None, None, *wanted)


def _through_rows(
    samples: _Samples,
    piece: _Rows,
    scores: Tensor,
    grad_p: Tensor,
    q_NRD: Tensor,
    compute: Weights,
    parameters: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> Tensor:
    """Turns `scores` into weights and `grad_p`, the weights' gradient, into that of the scores, in place.

    Adds the parameters' gradients to `sums`. Returns that of the queries as far as the method reads them
    itself, `[N, R, D]`.
    """
    direct_NRD = torch.zeros_like(q_NRD)
    for part in samples.parts(piece):
        rows = samples.problem.rows(part.queries.start, part.queries.stop)
        own = part.of(scores, piece).detach().requires_grad_()
        read = rows.q.detach().to(scores.dtype).requires_grad_()
        with torch.enable_grad():
            p = compute(replace(rows, q=read), own, part.keys.start)
        # Zeros, not None, for what the weights do not depend on.
        grad_own, grad_read, *others = torch.autograd.grad(
            p, [own, read, *parameters], part.of(grad_p, piece), materialize_grads=True
        )
        part.put(p.detach(), scores, piece)
        part.put(grad_own, grad_p, piece)
        direct_NRD[:, _shift(part.queries, piece.queries.start)] = grad_read.flatten(0, 1)
        for total, grad in zip(sums, others, strict=True):
            total += grad
    return direct_NRD
