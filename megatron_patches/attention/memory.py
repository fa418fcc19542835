"""Expected peak memory of one attention call above its inputs, for planning before a run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patches.attention import blocks

RETAINED = 6 << 20  # freed blocks that the allocator keeps while it works through a backward
FLOATS_PER_SCORE = 16  # of the method that keeps most, with the gaps that the allocator leaves
WORD = 4  # scores, tables and softmax are float32


@dataclass(frozen=True)
class Size:
    """One call: `itemsize` bytes an element of q; `gradients` counts forward and backward."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    itemsize: int = 4
    gradients: bool = False
    whole_rows: bool = False  # methods beyond tier `table`: all heads and whole key rows at once
    device: str = "cpu"  # its type decides how much `chunked` takes together

    @property
    def q(self) -> int:
        """Bytes of q, and of the output."""
        return self.batch * self.heads * self.queries * self.head_dim * self.itemsize

    @property
    def k(self) -> int:
        return self.batch * self.heads * self.keys * self.head_dim * self.itemsize


def peak_bytes(name: str, size: Size) -> int:
    """Bytes above q, k, v at the worst moment of one call of an implementation.

    Raises ValueError for an implementation without a formula.
    """
    if name not in _FORMULAS:
        raise ValueError(f"no memory formula for attention implementation {name!r}")
    return _FORMULAS[name](size)


def _table(size: Size) -> int:
    """The table, its reversed copy with room for the future, and what its formula leaves behind."""
    return 3 * size.heads * (size.keys + blocks.FORWARD_CHUNK) * WORD


def _reference(size: Size) -> int:
    matrix = size.queries * size.keys * WORD
    scores = size.batch * size.heads * matrix
    # Scores and their masked copy, with the bias and what its formula leaves; the backward keeps the
    # probabilities and one more gradient of that size.
    kept = 4 if size.gradients else 2
    return kept * scores + 2 * size.heads * matrix + 2 * matrix + size.q + 2 * size.k


def _whole_rows(size: Size) -> int:
    """Scores of some queries over all heads, what the method makes of a few of them, and gradients."""
    samples, rows = blocks.whole_rows(size.batch, size.heads, size.keys, size.device)
    rows = min(rows, size.queries)
    row = samples * size.heads * size.keys
    worked = blocks.rows_worked_on(row, FLOATS_PER_SCORE, rows, size.device)
    worked *= row * FLOATS_PER_SCORE * WORD
    scores = row * rows * WORD
    # float32 copies of keys and values of the samples at hand
    flat = 2 * size.k * samples // size.batch * WORD // size.itemsize
    if not size.gradients:
        return size.q + flat + scores + worked + RETAINED
    return 2 * size.q + 2 * size.k + 2 * flat + 2 * scores + 3 * worked + RETAINED


def _chunked(size: Size) -> int:
    if size.whole_rows:
        return _whole_rows(size)
    forward = size.q + _chunked_group(size) + _table(size)
    if not size.gradients:
        return forward
    samples, heads = blocks.block_shape(size.batch, size.heads, size.keys, size.device)
    rows = min(blocks.BACKWARD_CHUNK, size.queries)
    wide = samples * heads * WORD
    # float32 copies of q, dO, k, v and the sums of dk, dv for the block at hand
    copies = wide * size.head_dim * (2 * size.queries + 4 * size.keys)
    # scores, probabilities, their gradient, and the buffer of the diagonal sums
    scores = wide * rows * (3 * size.keys + size.keys + rows)
    grads = size.q + 2 * size.k
    table = 2 * size.heads * (size.keys + rows) * WORD
    return size.q + _table(size) + table + grads + copies + scores + RETAINED


def _chunked_group(size: Size) -> int:
    """Copies of q, k and v for the heads of one call of the fused kernel."""
    per_head = 2 * size.batch * size.keys * size.head_dim * size.itemsize
    group = max(1, min(size.heads, blocks.FORWARD_BYTES // per_head))
    return (size.q + 2 * size.k) * group // size.heads


def _fused(size: Size) -> int:
    """A kernel that keeps only its output, the log-sum-exp and, backwards, the gradients."""
    statistics = 2 * size.batch * size.heads * size.queries * WORD
    grads = size.q + 2 * size.k if size.gradients else 0
    return size.q + statistics + grads + _table(size) * (2 if size.gradients else 1)


_FORMULAS = {"reference": _reference, "chunked": _chunked, "flex": _fused, "triton": _fused}
