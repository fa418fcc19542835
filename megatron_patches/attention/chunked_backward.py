"""The backward of `chunked`: every chunk's probabilities again, and sums along diagonals."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_patches.attention.blocks import (
    BACKWARD_CHUNK,
    LOG2E,
    blocks,
    probabilities,
    probabilities_again,
)
from megatron_patches.attention.gates import Gates, Place
from megatron_patches.attention.hankel import View, by_distance, diagonal_sums
from megatron_patches.attention.problem import Sight
from megatron_patches.attention.reach import first_keys


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table_HL: Tensor,
    weight_HL: Tensor | None,
    gates: Gates | None,
    out: Tensor,
    lse_BHQ: Tensor | None,
    grad_out: Tensor,
    scale: float,
    sight: Sight,
    *,
    table_gradient: bool,
    weight_gradient: bool,
    gate_gradient: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, table, weight, and of the gates' total and gain."""
    heads, queries, dim, keys = q.shape[1], q.shape[2], q.shape[3], k.shape[2]
    dtype, device, chunk = table_HL.dtype, q.device, min(BACKWARD_CHUNK, queries)
    unit = 1.0 if lse_BHQ is None else LOG2E
    view = View(table_HL * unit, chunk, sight.distances, float("-inf"))
    first_key = first_keys(q, k, table_HL, weight_HL, gates, scale, sight)
    weights = None if weight_HL is None else View(weight_HL, chunk, None, 0.0)
    grad_q, grad_k, grad_v = (torch.empty_like(t) for t in (q, k, v))
    grad_view = torch.zeros(heads, keys + chunk, dtype=dtype, device=device)
    grad_weight_view = torch.zeros_like(grad_view)
    grad_total = grad_gain = None
    if gates is not None and gate_gradient:
        grad_total = torch.zeros_like(gates.total)
        grad_gain = None if gates.gain is None else torch.zeros_like(gates.gain)

    for some, group in blocks(q.shape[0], heads, keys, sight.eps, device.type):
        samples, count = some.stop - some.start, group.stop - group.start

        def flat(t: Tensor, length: int) -> Tensor:
            return t.to(dtype).reshape(-1, length, dim)

        q_NQD = flat(q[some, group].flip(2), queries)
        grad_out_NQD = flat(grad_out[some, group].flip(2), queries)
        k_NKD, v_NKD = flat(k[some, group], keys), flat(v[some, group], keys)
        # a block at a time: over all heads the product would be as large as the output
        out_NQD = flat(out[some, group].flip(2), queries)
        delta_NQ1 = out_NQD.mul_(grad_out_NQD).sum(-1, keepdim=True)
        del out_NQD
        if lse_BHQ is not None:
            lse2_SGQ1 = (lse_BHQ[some, group] * LOG2E).flip(2)[..., None]
        sum_k, sum_v = torch.zeros_like(k_NKD), torch.zeros_like(v_NKD)
        # Score gradients lie in rows with `chunk` spare zero columns: see diagonal_sums.
        columns = keys + chunk if table_gradient or weight_gradient else 0
        buffer = torch.zeros(samples, count, chunk, columns, dtype=dtype, device=device)
        widest = 0
        for first, last in sight.chunks(queries, chunk):
            rows, start, end = last - first, first_key(first, last, group), sight.offset + last
            width, position = end - start, sight.offset + first
            flipped = slice(queries - last, queries - first)
            q_NCD, grad_NCD = q_NQD[:, flipped], grad_out_NQD[:, flipped]
            w = None if weights is None else weights.chunk(group, position, rows, start, end)
            kT_NDE = k_NKD[:, start:end].transpose(1, 2)
            bias = view.chunk(group, position, rows, start, end)
            gate = None
            if gates is not None:
                place = Place(some, group, sight.offset, queries, first, last, start, end)
                gate = gates.chunk(place)
                bias = gate.added_to(bias, unit)
            raw = None
            if lse_BHQ is None:
                padding = None if sight.padding is None else sight.padding[some, start:end]
                p, raw = probabilities(q_NCD, kT_NDE, bias, w, padding, scale, samples)
            else:
                p = probabilities_again(q_NCD, kT_NDE, bias, lse2_SGQ1[:, :, flipped], scale)
            p_NCE = p.view(-1, rows, width)
            sum_v[:, start:end].baddbmm_(p_NCE.transpose(1, 2), grad_NCD)
            grad_p = torch.baddbmm(
                delta_NQ1[:, flipped].neg().expand(-1, rows, width),
                grad_NCD,
                v_NKD[:, start:end].transpose(1, 2),
            )
            if table_gradient or weight_gradient:
                if widest > width:  # a window moves on: columns of the chunk before must not remain
                    buffer[..., width : widest + 1].zero_()
                widest = width
            column = keys - position - rows + start
            if table_gradient:
                grad_s = buffer[:, :, :rows, :width]
                torch.mul(p, grad_p.view(p.shape), out=grad_s)
                grad_view[group, column : column + rows + width - 1] += diagonal_sums(
                    buffer, rows, width
                )
            else:
                grad_s = grad_p.view(p.shape).mul_(p)
            if gate is not None and grad_total is not None:
                gate.give_back(grad_s, grad_total, grad_gain)
            if w is not None and raw is not None:
                if weight_gradient:
                    grad_raw = grad_s * w
                    torch.mul(grad_s, raw, out=buffer[:, :, :rows, :width])
                    grad_weight_view[group, column : column + rows + width - 1] += diagonal_sums(
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

    grad_table = by_distance(grad_view, keys, sight.distances) if table_gradient else None
    grad_weight = by_distance(grad_weight_view, keys, sight.distances) if weight_gradient else None
    return grad_q, grad_k, grad_v, grad_table, grad_weight, grad_total, grad_gain
