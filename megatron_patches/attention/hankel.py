"""A table of distances as the bias of a chunk of queries, without copying it.

For one head the bias of query m and key n is `table[m - n]`. With the queries of a chunk in *reverse*
order, row i holds query `last - i`, so the bias depends on `i + n` only: a Hankel matrix. All of its
rows are overlapping slices of one vector, the reversed table followed by -inf for the future. It is
therefore a strided view that costs no memory, and the softmax kernel of torch reads it like any mask.

Backwards the same structure returns: the gradient of `table[d]` is a sum along an anti-diagonal of the
score gradients, and an anti-diagonal sum is a column sum of the same kind of view.
"""

from __future__ import annotations

import torch
from torch import Tensor


class View:
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


def diagonal_sums(buffer_SGCW: Tensor, rows: int, width: int) -> Tensor:
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


def by_distance(grad_view: Tensor, keys: int, window: int | None) -> Tensor:
    """From the order of the view back to distances; distances outside the window had no effect."""
    grad_HL = grad_view[:, :keys].flip(-1)
    if window is not None:
        grad_HL[:, window:] = 0
    return grad_HL
