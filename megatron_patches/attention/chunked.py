"""Attention in linear memory: chunks of queries over a view of the distance table.

`hankel.py` explains the view. Methods that are more than a table of distances go to `recompute.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_patches.attention.blocks import (
    BACKWARD_CHUNK,
    FORWARD_CHUNK,
    blocks,
    forward_blocks,
    probabilities,
)
from megatron_patches.attention.chunked_backward import backward
from megatron_patches.attention.gates import Gates, Place
from megatron_patches.attention.hankel import View
from megatron_patches.attention.problem import Problem, Sight
from megatron_patches.attention.reach import first_keys
from megatron_patches.attention.recompute import recomputed
from megatron_patches.positions._once import first_order


def refuses(problem: Problem) -> str | None:
    """Nothing is refused: it stands behind every other implementation."""
    return None


def run(problem: Problem) -> Tensor:
    """`out_BHQD` for every tier; no tensor of queries x keys exists at any time."""
    if not problem.method.whole_rows:
        return _by_distance(problem)
    near = min(max(0, problem.method.rows_by_distance - problem.sight.offset), problem.queries)
    if near == 0:
        return recomputed(problem)
    if near == problem.queries:
        return _by_distance(problem)
    first, rest = problem.split(near)
    return torch.cat([_by_distance(first), recomputed(rest)], dim=2)


def _by_distance(problem: Problem) -> Tensor:
    method, gates = problem.method, problem.gates
    table_HL = method.table(problem.keys)
    if table_HL is None:
        table_HL = torch.zeros(problem.q.shape[1], problem.keys, device=problem.q.device)
    weight_HL = method.weight_table(problem.keys)
    dtype = problem.compute_dtype
    problem = problem.without_padding_values()
    out: Tensor = _Chunked.apply(
        problem.q,
        problem.k,
        problem.v,
        table_HL.to(dtype),
        None if weight_HL is None else weight_HL.to(dtype),
        None if gates is None else gates.total,
        None if gates is None else gates.gain,
        () if gates is None else (gates.falls, gates.run),
        problem.scale,
        problem.sight,
    )
    return out


class _Chunked(torch.autograd.Function):
    """Forward over query chunks; backward recomputes each chunk's probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table_HL: Tensor,
        weight_HL: Tensor | None,
        total_BHK: Tensor | None,
        gain_BHQ: Tensor | None,
        known: tuple[Any, ...],
        scale: float,
        sight: Sight,
    ) -> Tensor:
        gates = None if total_BHK is None else Gates(total_BHK, gain_BHQ, *known)
        # torch's fused kernel reads the view as a mask. It knows neither a factor on the scores nor a
        # row without visible keys, and off the CPU it would copy the view and round it to q's dtype.
        fused = weight_HL is None and sight.padding is None and q.device.type == "cpu"
        lse_BHQ = None
        if fused:
            keep = any(ctx.needs_input_grad)
            out, lse_BHQ = _fused_forward(q, k, v, table_HL, gates, scale, sight, keep)
        else:
            out = _plain_forward(q, k, v, table_HL, weight_HL, gates, scale, sight)
        ctx.save_for_backward(q, k, v, table_HL, weight_HL, total_BHK, gain_BHQ, out, lse_BHQ)
        ctx.known, ctx.scale, ctx.sight = known, scale, sight
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table_HL, weight_HL, total_BHK, gain_BHQ, out, lse_BHQ = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grads = backward(
            q,
            k,
            v,
            table_HL,
            weight_HL,
            None if total_BHK is None else Gates(total_BHK, gain_BHQ, *ctx.known),
            out,
            lse_BHQ,
            grad_out,
            ctx.scale,
            ctx.sight,
            table_gradient=needs[3],
            weight_gradient=needs[4],
            gate_gradient=needs[5] or needs[6],
        )
        return (
            *(g if need else None for g, need in zip(grads, needs, strict=False)),
            None,
            None,
            None,
        )


# torch's fused CPU kernel gives the log-sum-exp only under its private name. Without it the backward
# computes a softmax again: the same numbers, a few percent slower.
_WITH_LSE = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def _fused_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table_HL: Tensor,
    gates: Gates | None,
    scale: float,
    sight: Sight,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """The output, and the log-sum-exp `[B, H, Q]` of every row if `keep` asks for it."""
    queries, keys = q.shape[2], k.shape[2]
    view = View(table_HL, min(FORWARD_CHUNK, queries), sight.distances, float("-inf"))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse_BHQ = None
    if keep and _WITH_LSE is not None and q.dtype != torch.float64:
        lse_BHQ = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    first_key = first_keys(q, k, table_HL, None, gates, scale, sight)
    for some, group in forward_blocks(q, keys, sight.eps, gated=gates is not None):
        # contiguous: a transposed view would be copied again in every chunk
        k_SGKD, v_SGKD = k[some, group].contiguous(), v[some, group].contiguous()
        q_SGQD = q[some, group].flip(2).contiguous()  # flip keeps the order of the strides
        for first, last in sight.chunks(queries, FORWARD_CHUNK):
            start, end = first_key(first, last, group), sight.offset + last
            mask = view.chunk(group, sight.offset + first, last - first, start, end)[None]
            if gates is not None:
                place = Place(some, group, sight.offset, queries, first, last, start, end)
                mask = gates.chunk(place).added_to(mask[0])
            # The private kernel is wrong unless the last stride is 1, which the copies above ensure.
            part = (
                q_SGQD[:, :, queries - last : queries - first],
                k_SGKD[:, :, start:end],
                v_SGKD[:, :, start:end],
            )
            if lse_BHQ is None or _WITH_LSE is None:
                block = F.scaled_dot_product_attention(*part, attn_mask=mask, scale=scale)
            else:
                block, lse = _WITH_LSE(*part, 0.0, False, attn_mask=mask, scale=scale)
                lse_BHQ[some, group, first:last] = lse.flip(2)
            out[some, group, first:last] = block.flip(2)
    return out, lse_BHQ


def _plain_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table_HL: Tensor,
    weight_HL: Tensor | None,
    gates: Gates | None,
    scale: float,
    sight: Sight,
) -> Tensor:
    queries, dim, dtype = q.shape[2], q.shape[3], table_HL.dtype
    chunk = min(BACKWARD_CHUNK, queries)
    view = View(table_HL, chunk, sight.distances, float("-inf"))
    weights = None if weight_HL is None else View(weight_HL, chunk, None, 0.0)
    first_key = first_keys(q, k, table_HL, weight_HL, gates, scale, sight)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for some, heads in blocks(q.shape[0], q.shape[1], k.shape[2], sight.eps, q.device.type):
        samples, group = some.stop - some.start, heads.stop - heads.start
        q_NQD = q[some, heads].flip(2).to(dtype).reshape(-1, queries, dim)
        kT_NDK = k[some, heads].to(dtype).reshape(-1, k.shape[2], dim).transpose(1, 2)
        v_NKD = v[some, heads].to(dtype).reshape(-1, k.shape[2], dim)
        for first, last in sight.chunks(queries, chunk):
            rows, start, end = last - first, first_key(first, last, heads), sight.offset + last
            position = sight.offset + first
            bias = view.chunk(heads, position, rows, start, end)
            if gates is not None:
                place = Place(some, heads, sight.offset, queries, first, last, start, end)
                bias = gates.chunk(place).added_to(bias)
            p, _ = probabilities(
                q_NQD[:, queries - last : queries - first],
                kT_NDK[:, :, start:end],
                bias,
                None if weights is None else weights.chunk(heads, position, rows, start, end),
                None if sight.padding is None else sight.padding[some, start:end],
                scale,
                samples,
            )
            block = torch.bmm(p.view(-1, rows, end - start), v_NKD[:, start:end])
            out[some, heads, first:last] = block.view(samples, group, rows, dim).flip(2).to(q.dtype)
    return out
