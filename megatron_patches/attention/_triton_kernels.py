# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: what the kernels share, and the forward kernel.

Scores are in base 2: whatever enters an exponential was multiplied by log2(e) on the host, so `exp2`
and `log2`, which the hardware has, are used alone. Suffixes: M queries, N keys, D head dimension of
a tile. `position` is a query's place among the keys, `distance = position - key`.

No tile needs to ask whether a key lies beyond the last one: such a key is in the future of every query.
Queries beyond the last one exist in ragged tiles; their results are never stored.
"""

from __future__ import annotations

import importlib
from typing import Any

# Triton is optional, so only functions import this file; and triton is untyped, so it is `Any` here.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

# With TRITON_INTERPRET=1 in the environment before triton's first import, its library and these
# kernels are Python functions on CPU tensors.
INTERPRETED = not isinstance(tl.sum, triton.JITFunction)


@triton.jit
def load_rows(POINTER, rows, limit, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a contiguous [length, HEAD_DIM] matrix, zeros beyond `limit` and beyond HEAD_DIM."""
    columns = tl.arange(0, BLOCK_D)
    place = rows[:, None] * HEAD_DIM + columns[None, :]
    if BLOCK_D == HEAD_DIM:
        tile = tl.load(POINTER + place, mask=rows[:, None] < limit, other=0.0)
    else:
        inside = (rows[:, None] < limit) & (columns[None, :] < HEAD_DIM)
        tile = tl.load(POINTER + place, mask=inside, other=0.0)
    return tile


@triton.jit
def store_rows(POINTER, tile, rows, limit, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The reverse of `load_rows`, in the dtype of the target."""
    columns = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < limit) & (columns[None, :] < HEAD_DIM)
    place = rows[:, None] * HEAD_DIM + columns[None, :]
    tl.store(POINTER + place, tile.to(POINTER.dtype.element_ty), mask=inside)


@triton.jit
def dot(left, right, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Matrix product with fp32 sums.

    UPCAST is for the interpreter: it multiplies the bit patterns of bf16 (triton issue 11584).
    """
    if UPCAST:
        product = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision=PRECISION)
    else:
        product = tl.dot(left, right, input_precision=PRECISION)
    return product


@triton.jit
def falloff(distance, rate, KIND: tl.constexpr):
    """f(distance) in fp32, where a closed form adds -scale * f: log2(1 + rate d), d ** rate, or d."""
    d = distance.to(tl.float32)
    if KIND == "log":
        f = tl.log2(1.0 + rate * tl.maximum(d, 0.0))
    elif KIND == "power":
        f = tl.where(distance > 0, tl.exp2(rate * tl.log2(tl.maximum(d, 1.0))), 0.0)
    else:
        f = d
    return f


@triton.jit
def falloff_slope(distance, f, rate, KIND: tl.constexpr):
    """df/drate without its constant factor, which the host multiplies."""
    d = tl.maximum(distance.to(tl.float32), 0.0)
    if KIND == "log":
        slope = d / (1.0 + rate * d)
    else:
        slope = f * tl.log2(tl.maximum(d, 1.0))
    return slope


@triton.jit
def read_by_distance(TABLE, distance, longest):
    """Entries of one head's table; a distance outside [0, longest] reads a legal but wrong entry.

    A tile reads neighbouring entries many times over: they come from the first-level cache.
    """
    return tl.load(TABLE + tl.minimum(tl.maximum(distance, 0), longest))


@triton.jit
def finish_scores(
    raw,
    distance,
    TABLE,
    WEIGHT,
    scale,
    rate,
    longest,
    window,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(scores, factor of the scaled products): weight, bias and, where MASKED, -inf out of sight."""
    scores = raw
    weight = 1.0
    if WEIGHTED:
        weight = read_by_distance(WEIGHT, distance, longest)
        scores = scores * weight
    if KIND == "table":
        scores = scores + read_by_distance(TABLE, distance, longest)
    elif KIND != "none":
        scores = scores - scale * falloff(distance, rate, KIND)
    if MASKED:
        visible = distance >= 0
        if WINDOWED:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores, -float("inf"))
    return scores, weight


@triton.jit
def closed_numbers(SCALE, RATE, head, KIND: tl.constexpr):
    """(scale, rate) of one head; zeros where the kind has none."""
    scale = 0.0
    rate = 0.0
    if KIND == "log" or KIND == "power" or KIND == "linear":
        scale = tl.load(SCALE + head)
        if KIND != "linear":
            rate = tl.load(RATE + head)
    return scale, rate


@triton.jit
def key_spans(
    position, keys, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr
):
    """Four multiples of BLOCK_N (the last may be ragged) for queries from `position` on.

    They are the first visible key tile, the first and the end of the tiles visible to all queries
    (no mask), and the end of the visible ones.
    """
    end = tl.minimum(keys, position + BLOCK_M)
    whole_end = (position + 1) // BLOCK_N * BLOCK_N
    first = 0
    whole_first = 0
    if WINDOWED:
        first = tl.maximum(0, position - window + 1) // BLOCK_N * BLOCK_N
        whole_first = tl.cdiv(tl.maximum(0, position + BLOCK_M - window), BLOCK_N) * BLOCK_N
        whole_end = tl.maximum(whole_end, first)
        whole_first = tl.minimum(whole_first, whole_end)
    return first, whole_first, whole_end, end


@triton.jit
def forward_span(
    best,
    total,
    sum_MD,
    q_MD,
    K,
    V,
    position_M,
    begin,
    end,
    TABLE,
    WEIGHT,
    scale,
    rate,
    factor,
    keys,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Running softmax over the key tiles of [begin, end): highest score, sum of weights, sum of values."""
    for start in range(begin, end, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        k_ND = load_rows(K, key_N, keys, HEAD_DIM, BLOCK_D)
        distance = position_M[:, None] - key_N[None, :]
        raw = dot(q_MD, tl.trans(k_ND), PRECISION, UPCAST) * factor
        scores, weight = finish_scores(
            raw,
            distance,
            TABLE,
            WEIGHT,
            scale,
            rate,
            keys - 1,
            window,
            KIND,
            WEIGHTED,
            WINDOWED,
            MASKED,
        )
        higher = tl.maximum(best, tl.max(scores, 1))
        # A row may have seen nothing yet, or only biases that overflowed to -inf: -inf - -inf is NaN.
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        v_ND = load_rows(V, key_N, keys, HEAD_DIM, BLOCK_D)
        total = total * shrink + tl.sum(p, 1)
        sum_MD = sum_MD * shrink[:, None] + dot(p.to(v_ND.dtype), v_ND, PRECISION, UPCAST)
        best = higher
    return best, total, sum_MD


@triton.jit
def forward(
    Q,
    K,
    V,
    OUT,
    LSE,
    TABLE,
    WEIGHT,
    SCALE,
    RATE,
    factor,
    heads,
    queries,
    keys,
    offset,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One block of queries of one head: OUT and the base-2 log-sum-exp LSE of its rows.

    `factor` is the score scale times log2(e); TABLE and SCALE are in base 2 as well.
    """
    blocks = tl.cdiv(queries, BLOCK_M)
    sample_head = (tl.program_id(0) // blocks).to(tl.int64)
    # Late queries see the most keys: they start first, so that no long program is left over at the end.
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    head = sample_head % heads
    query_M = start + tl.arange(0, BLOCK_M)
    position_M = offset + query_M
    K += sample_head * keys * HEAD_DIM
    V += sample_head * keys * HEAD_DIM
    if KIND == "table":
        TABLE += head * keys
    if WEIGHTED:
        WEIGHT += head * keys
    scale, rate = closed_numbers(SCALE, RATE, head, KIND)
    q_MD = load_rows(Q + sample_head * queries * HEAD_DIM, query_M, queries, HEAD_DIM, BLOCK_D)
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sum_MD = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first, whole_first, whole_end, end = key_spans(
        offset + start, keys, window, BLOCK_M, BLOCK_N, WINDOWED
    )
    # fmt: off
    if WINDOWED:
        best, total, sum_MD = forward_span(
            best, total, sum_MD, q_MD, K, V, position_M, first, whole_first, TABLE, WEIGHT, scale, rate,
            factor, keys, window, HEAD_DIM, BLOCK_D, BLOCK_N, KIND, WEIGHTED, WINDOWED, True,
            PRECISION, UPCAST)
    best, total, sum_MD = forward_span(
        best, total, sum_MD, q_MD, K, V, position_M, whole_first, whole_end, TABLE, WEIGHT, scale, rate,
        factor, keys, window, HEAD_DIM, BLOCK_D, BLOCK_N, KIND, WEIGHTED, WINDOWED, False,
        PRECISION, UPCAST)
    best, total, sum_MD = forward_span(
        best, total, sum_MD, q_MD, K, V, position_M, whole_end, end, TABLE, WEIGHT, scale, rate,
        factor, keys, window, HEAD_DIM, BLOCK_D, BLOCK_N, KIND, WEIGHTED, WINDOWED, True,
        PRECISION, UPCAST)
    # fmt: on
    total = tl.where(total == 0.0, 1.0, total)  # rows beyond the last query may see nothing
    store_rows(
        OUT + sample_head * queries * HEAD_DIM,
        sum_MD / total[:, None],
        query_M,
        queries,
        HEAD_DIM,
        BLOCK_D,
    )
    tl.store(LSE + sample_head * queries + query_M, best + tl.log2(total), mask=query_M < queries)
