"""Attention in linear memory: chunks of queries over a view of the distance table.

For one head the bias of query m and key n is `table[m - n]`. With the queries of a chunk in *reverse*
order, row i holds query `last - i`, so the bias depends on `i + n` only: a Hankel matrix. All of its
rows are overlapping slices of one vector, the reversed table followed by -inf for the future. It is
therefore a strided view that costs no memory, and the softmax kernel of torch reads it like any mask.

Backwards the same structure returns: the gradient of `table[d]` is a sum along an anti-diagonal of the
score gradients, and an anti-diagonal sum is a column sum of the same kind of view.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatron_patches.attention.problem import Problem, Sight, dense

FORWARD_CHUNK = 256  # queries per call; larger chunks compute more of the masked future
BACKWARD_CHUNK = 128
FORWARD_BYTES = 1 << 21  # keys and values of the heads of one call should stay in the cache
BACKWARD_SCORES = 1 << 18  # floats in one block of scores: 1 MB, the second-level cache


def refuses(problem: Problem) -> str | None:
    """Nothing is refused: it stands behind every other implementation."""
    return None


def run(problem: Problem) -> Tensor:
    """`out_BHQD` for every tier; no tensor of queries x keys exists at any time."""
    if problem.method.tier != "table":
        return _recomputed(problem)
    method = problem.method
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
        problem.scale,
        problem.sight,
    )
    return out


def _recomputed(problem: Problem) -> Tensor:
    """Tiers `positional` and `content`: dense in each chunk, recomputed in the backward.

    A method of these tiers may look at whole rows, so keys are never split, heads stay together.
    """
    chunks = []
    for first in range(0, problem.queries, BACKWARD_CHUNK):
        part = problem.rows(first, min(first + BACKWARD_CHUNK, problem.queries))
        first_key = problem.sight.first_key(first)
        if problem.needs_gradient:
            out: Tensor = checkpoint(dense, part, first_key, use_reentrant=False)
            chunks.append(out)
        else:
            chunks.append(dense(part, first_key))
    return torch.cat(chunks, dim=2)


class _View:
    """The reversed table of every head, and the strided windows that chunks see of it."""

    def __init__(self, table_HL: Tensor, chunk: int, window: int | None, beyond: float) -> None:
        length = table_HL.shape[1]
        future = table_HL.new_full((table_HL.shape[0], chunk), beyond)
        reversed_HL = table_HL.flip(-1)
        if window is not None and window < length:
            reversed_HL[:, : length - window] = beyond
        self.length = length
        self.vector = torch.cat([reversed_HL, future], dim=-1)

    def chunk(self, heads: slice, position: int, rows: int, start: int, end: int) -> Tensor:
        """`[heads, rows, end - start]` for queries `position + rows - 1 ... position`, keys from `start`."""
        vector = self.vector[heads]
        column = self.length - position - rows + start
        size = (vector.shape[0], rows, end - start)
        return vector.as_strided(
            size, (vector.stride(0), 1, 1), vector.storage_offset() + column * vector.stride(1)
        )


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
        scale: float,
        sight: Sight,
    ) -> Tensor:
        # torch's fused kernel reads the view as a mask. It knows neither a factor on the scores nor a
        # row without visible keys, and off the CPU it would copy the view and round it to q's dtype.
        fused = weight_HL is None and sight.padding is None and q.device.type == "cpu"
        if fused:
            out = _fused_forward(q, k, v, table_HL, scale, sight)
        else:
            out = _plain_forward(q, k, v, table_HL, weight_HL, scale, sight)
        ctx.save_for_backward(q, k, v, table_HL, weight_HL, out)
        ctx.scale, ctx.sight = scale, sight
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table_HL, weight_HL, out = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grads = _backward(
            q,
            k,
            v,
            table_HL,
            weight_HL,
            out,
            grad_out,
            ctx.scale,
            ctx.sight,
            table_gradient=needs[3],
            weight_gradient=needs[4],
        )
        return (*(g if need else None for g, need in zip(grads, needs, strict=False)), None, None)


def _fused_forward(
    q: Tensor, k: Tensor, v: Tensor, table_HL: Tensor, scale: float, sight: Sight
) -> Tensor:
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    view = _View(table_HL, min(FORWARD_CHUNK, queries), sight.window, float("-inf"))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    per_head = 2 * q.shape[0] * keys * q.shape[3] * q.element_size()
    group = max(1, min(heads, FORWARD_BYTES // per_head))
    for first_head in range(0, heads, group):
        some = slice(first_head, min(first_head + group, heads))
        # contiguous: a transposed view would be copied again in every chunk
        k_BGKD, v_BGKD = k[:, some].contiguous(), v[:, some].contiguous()
        q_BGQD = q[:, some].flip(2)
        for first in range(0, queries, FORWARD_CHUNK):
            last = min(first + FORWARD_CHUNK, queries)
            start, end = sight.first_key(first), sight.offset + last
            mask = view.chunk(some, sight.offset + first, last - first, start, end)
            block = F.scaled_dot_product_attention(
                q_BGQD[:, :, queries - last : queries - first],
                k_BGKD[:, :, start:end],
                v_BGKD[:, :, start:end],
                attn_mask=mask[None],
                scale=scale,
            )
            out[:, some, first:last] = block.flip(2)
    return out


def _blocks(batch: int, heads: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and heads whose scores of one chunk fit the cache together."""
    budget = max(1, BACKWARD_SCORES // (BACKWARD_CHUNK * keys))
    samples = min(batch, budget)
    group = max(1, min(heads, budget // samples))
    for first_sample in range(0, batch, samples):
        for first_head in range(0, heads, group):
            yield (
                slice(first_sample, min(first_sample + samples, batch)),
                slice(first_head, min(first_head + group, heads)),
            )


def _probabilities(
    q_NCD: Tensor,
    kT_NDE: Tensor,
    bias_GCE: Tensor,
    weight_GCE: Tensor | None,
    padding_SE: Tensor | None,
    scale: float,
    samples: int,
) -> tuple[Tensor, Tensor | None]:
    """Softmax of one chunk, `[samples, group, rows, keys]`, and its scaled scores where a factor acts."""
    group, rows, width = bias_GCE.shape
    shape = (samples, group, rows, width)
    raw = None
    if weight_GCE is None:
        scores = bias_GCE.expand(shape).contiguous()
        scores.view(-1, rows, width).baddbmm_(q_NCD, kT_NDE, alpha=scale)
    else:
        raw = torch.bmm(q_NCD, kT_NDE).mul_(scale).view(shape)
        scores = torch.addcmul(bias_GCE, raw, weight_GCE)
    if padding_SE is None:
        return torch.softmax(scores, -1), raw
    hidden = padding_SE[:, None, None, :]
    # Finite, so that a row without visible keys survives the softmax and then becomes zeros.
    scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1).masked_fill_(hidden, 0.0), raw


def _plain_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table_HL: Tensor,
    weight_HL: Tensor | None,
    scale: float,
    sight: Sight,
) -> Tensor:
    queries, dim, dtype = q.shape[2], q.shape[3], table_HL.dtype
    chunk = min(BACKWARD_CHUNK, queries)
    view = _View(table_HL, chunk, sight.window, float("-inf"))
    weights = None if weight_HL is None else _View(weight_HL, chunk, None, 0.0)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for some, heads in _blocks(q.shape[0], q.shape[1], k.shape[2]):
        samples, group = some.stop - some.start, heads.stop - heads.start
        q_NQD = q[some, heads].flip(2).to(dtype).reshape(-1, queries, dim)
        kT_NDK = k[some, heads].to(dtype).reshape(-1, k.shape[2], dim).transpose(1, 2)
        v_NKD = v[some, heads].to(dtype).reshape(-1, k.shape[2], dim)
        for first in range(0, queries, chunk):
            last = min(first + chunk, queries)
            rows, start, end = last - first, sight.first_key(first), sight.offset + last
            position = sight.offset + first
            p, _ = _probabilities(
                q_NQD[:, queries - last : queries - first],
                kT_NDK[:, :, start:end],
                view.chunk(heads, position, rows, start, end),
                None if weights is None else weights.chunk(heads, position, rows, start, end),
                None if sight.padding is None else sight.padding[some, start:end],
                scale,
                samples,
            )
            block = torch.bmm(p.view(-1, rows, end - start), v_NKD[:, start:end])
            out[some, heads, first:last] = block.view(samples, group, rows, dim).flip(2).to(q.dtype)
    return out


def _diagonal_sums(buffer_SGCW: Tensor, rows: int, width: int) -> Tensor:
    """Sums over samples and over the anti-diagonals of `buffer[..., :rows, :width]`: `[group, rows+width-1]`.

    Needs `rows - 1` zero columns behind `width`: the view steps one element less than a row, so the
    shifted rows overlap into them.
    """
    samples, group, _, _ = buffer_SGCW.shape
    s, g, c, _ = buffer_SGCW.stride()
    view = buffer_SGCW.as_strided(
        (samples, group, rows, rows + width - 1), (s, g, c - 1, 1), buffer_SGCW.storage_offset()
    )
    return view.sum((0, 2))


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table_HL: Tensor,
    weight_HL: Tensor | None,
    out: Tensor,
    grad_out: Tensor,
    scale: float,
    sight: Sight,
    *,
    table_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    heads, queries, dim, keys = q.shape[1], q.shape[2], q.shape[3], k.shape[2]
    dtype, device, chunk = table_HL.dtype, q.device, min(BACKWARD_CHUNK, queries)
    view = _View(table_HL, chunk, sight.window, float("-inf"))
    weights = None if weight_HL is None else _View(weight_HL, chunk, None, 0.0)
    grad_q, grad_k, grad_v = (torch.empty_like(t) for t in (q, k, v))
    grad_view = torch.zeros(heads, keys + chunk, dtype=dtype, device=device)
    grad_weight_view = torch.zeros_like(grad_view)
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)

    for some, group in _blocks(q.shape[0], heads, keys):
        samples, count = some.stop - some.start, group.stop - group.start

        def flat(t: Tensor, length: int) -> Tensor:
            return t.to(dtype).reshape(-1, length, dim)

        q_NQD = flat(q[some, group].flip(2), queries)
        grad_out_NQD = flat(grad_out[some, group].flip(2), queries)
        k_NKD, v_NKD = flat(k[some, group], keys), flat(v[some, group], keys)
        delta_NQ1 = delta[some, group].flip(2).reshape(-1, queries, 1)
        sum_k, sum_v = torch.zeros_like(k_NKD), torch.zeros_like(v_NKD)
        # Score gradients lie in rows with `chunk` spare zero columns: see _diagonal_sums.
        buffer = torch.zeros(samples, count, chunk, keys + chunk, dtype=dtype, device=device)
        widest = 0
        for first in range(0, queries, chunk):
            last = min(first + chunk, queries)
            rows, start, end = last - first, sight.first_key(first), sight.offset + last
            width, position = end - start, sight.offset + first
            flipped = slice(queries - last, queries - first)
            q_NCD, grad_NCD = q_NQD[:, flipped], grad_out_NQD[:, flipped]
            w = None if weights is None else weights.chunk(group, position, rows, start, end)
            p, raw = _probabilities(
                q_NCD,
                k_NKD[:, start:end].transpose(1, 2),
                view.chunk(group, position, rows, start, end),
                w,
                None if sight.padding is None else sight.padding[some, start:end],
                scale,
                samples,
            )
            p_NCE = p.view(-1, rows, width)
            sum_v[:, start:end].baddbmm_(p_NCE.transpose(1, 2), grad_NCD)
            grad_p = torch.baddbmm(
                delta_NQ1[:, flipped].neg().expand(-1, rows, width),
                grad_NCD,
                v_NKD[:, start:end].transpose(1, 2),
            )
            if table_gradient or weight_gradient:
                if widest > width:  # a window slides: columns of the chunk before must not remain
                    buffer[..., width : widest + 1].zero_()
                widest = width
            column = keys - position - rows + start
            if table_gradient:
                grad_s = buffer[:, :, :rows, :width]
                torch.mul(p, grad_p.view(p.shape), out=grad_s)
                grad_view[group, column : column + rows + width - 1] += _diagonal_sums(
                    buffer, rows, width
                )
            else:
                grad_s = grad_p.view(p.shape).mul_(p)
            if w is not None and raw is not None:
                if weight_gradient:
                    grad_raw = grad_s * w
                    torch.mul(grad_s, raw, out=buffer[:, :, :rows, :width])
                    grad_weight_view[group, column : column + rows + width - 1] += _diagonal_sums(
                        buffer, rows, width
                    )
                    grad_s = grad_raw
                else:
                    grad_s = grad_s * w
            grad_s_NCE = grad_s.reshape(-1, rows, width)
            sum_k[:, start:end].baddbmm_(grad_s_NCE.transpose(1, 2), q_NCD, alpha=scale)
            block = torch.bmm(grad_s_NCE, k_NKD[:, start:end]).mul_(scale)
            grad_q[some, group, first:last] = (
                block.view(samples, count, rows, dim).flip(2).to(q.dtype)
            )
        grad_k[some, group] = sum_k.view(samples, count, keys, dim).to(k.dtype)
        grad_v[some, group] = sum_v.view(samples, count, keys, dim).to(v.dtype)

    grad_table = _visible(grad_view, keys, sight.window) if table_gradient else None
    grad_weight = _visible(grad_weight_view, keys, sight.window) if weight_gradient else None
    return grad_q, grad_k, grad_v, grad_table, grad_weight


def _visible(grad_view: Tensor, keys: int, window: int | None) -> Tensor:
    """From the order of the view back to distances; distances outside the window had no effect."""
    grad_HL = grad_view[:, :keys].flip(-1)
    if window is not None:
        grad_HL[:, window:] = 0
    return grad_HL
