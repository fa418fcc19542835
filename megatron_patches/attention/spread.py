"""A table of distances as a dense bias, for attention that is not ours and adds a matrix.

Shape suffixes: H heads, Q queries, K keys, L distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_patches.attention.hankel import View, by_distance, diagonal_sums


def spread(table_HL: Tensor, queries: int) -> Tensor:
    """`[H, queries, L]` with `out[h, i, j] = table[h, d]`, d = L - queries + i - j; 0 where d < 0.

    The queries are the last ones of L positions. Differentiable in `table_HL`; its gradient is summed
    along the diagonals in time linear in the size of the output, without an index.

    Raises ValueError unless 1 <= queries <= L.
    """
    length = table_HL.shape[1]
    if not 1 <= queries <= length:
        raise ValueError(f"{queries} queries but a table of {length} distances")
    out: Tensor = _Spread.apply(table_HL, queries)
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_HL: Tensor, queries: int) -> Tensor:
        heads, length = table_HL.shape
        ctx.queries = queries
        view = View(table_HL, queries, None, 0.0)
        return view.chunk(slice(0, heads), length - queries, queries, 0, length).flip(1)

    @staticmethod
    def backward(ctx: Any, grad_HQK: Tensor) -> tuple[Tensor, None]:
        heads, queries, length = grad_HQK.shape
        # `diagonal_sums` needs queries - 1 zero columns behind each row.
        buffer = grad_HQK.new_zeros(1, heads, queries, length + queries)
        buffer[0, :, :, :length] = grad_HQK.flip(1)
        sums = diagonal_sums(buffer, queries, length)
        return by_distance(sums, length, None), None
