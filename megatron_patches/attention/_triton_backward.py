# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: the backward kernels. Probabilities are computed again from the log-sum-exp; nothing is atomic.

Every sum is made by one program in a fixed order, so that the same input gives the same bits. Call
`by_query` first: it also stores `DELTA`, which the others read. Conventions as in `_triton_kernels`.

A query beyond the last one is read with a log-sum-exp of +inf: all of its probabilities are then 0.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_patches.attention._triton_kernels import (
    closed_numbers,
    dot,
    falloff,
    falloff_slope,
    finish_scores,
    key_spans,
    load_rows,
    store_rows,
)

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

# One argument a line would make these signatures and calls longer than the kernels.
# fmt: off


@triton.jit
def by_query_span(
    grad_MD, q_MD, grad_out_MD, lse_M, delta_M, K, V, position_M, begin, end, TABLE, WEIGHT, scale,
    rate, factor, keys, window, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, WEIGHTED: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """Add the key tiles of [begin, end) to the gradient of a block of queries."""
    for start in range(begin, end, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        k_ND = load_rows(K, key_N, keys, HEAD_DIM, BLOCK_D)
        v_ND = load_rows(V, key_N, keys, HEAD_DIM, BLOCK_D)
        distance = position_M[:, None] - key_N[None, :]
        raw = dot(q_MD, tl.trans(k_ND), PRECISION, UPCAST) * factor
        scores, weight = finish_scores(
            raw, distance, TABLE, WEIGHT, scale, rate, keys - 1, window, KIND, WEIGHTED, WINDOWED,
            MASKED)
        p = tl.exp2(scores - lse_M[:, None])
        grad_p = dot(grad_out_MD, tl.trans(v_ND), PRECISION, UPCAST)
        grad_raw = p * (grad_p - delta_M[:, None]) * weight
        grad_MD += dot(grad_raw.to(k_ND.dtype), k_ND, PRECISION, UPCAST)
    return grad_MD


@triton.jit
def by_query(
    Q, K, V, OUT, GRAD_OUT, LSE, DELTA, GRAD_Q, TABLE, WEIGHT, SCALE, RATE, factor, score_scale, heads,
    queries, keys, offset, window, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KIND: tl.constexpr, WEIGHTED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One block of queries of one head: GRAD_Q, and DELTA = rowsum(OUT * GRAD_OUT)."""
    blocks = tl.cdiv(queries, BLOCK_M)
    sample_head = (tl.program_id(0) // blocks).to(tl.int64)
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M  # the longest programs first
    head = sample_head % heads
    query_M = start + tl.arange(0, BLOCK_M)
    rows = sample_head * queries
    K += sample_head * keys * HEAD_DIM
    V += sample_head * keys * HEAD_DIM
    if KIND == "table":
        TABLE += head * keys
    if WEIGHTED:
        WEIGHT += head * keys
    scale, rate = closed_numbers(SCALE, RATE, head, KIND)
    q_MD = load_rows(Q + rows * HEAD_DIM, query_M, queries, HEAD_DIM, BLOCK_D)
    grad_out_MD = load_rows(GRAD_OUT + rows * HEAD_DIM, query_M, queries, HEAD_DIM, BLOCK_D)
    out_MD = load_rows(OUT + rows * HEAD_DIM, query_M, queries, HEAD_DIM, BLOCK_D)
    delta_M = tl.sum(out_MD.to(tl.float32) * grad_out_MD.to(tl.float32), 1)
    tl.store(DELTA + rows + query_M, delta_M, mask=query_M < queries)
    lse_M = tl.load(LSE + rows + query_M, mask=query_M < queries, other=float("inf"))

    grad_MD = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    position_M = offset + query_M
    first, whole_first, whole_end, end = key_spans(
        offset + start, keys, window, BLOCK_M, BLOCK_N, WINDOWED
    )
    if WINDOWED:
        grad_MD = by_query_span(
            grad_MD, q_MD, grad_out_MD, lse_M, delta_M, K, V, position_M, first, whole_first, TABLE,
            WEIGHT, scale, rate, factor, keys, window, HEAD_DIM, BLOCK_D, BLOCK_N, KIND, WEIGHTED,
            WINDOWED, True, PRECISION, UPCAST)
    grad_MD = by_query_span(
        grad_MD, q_MD, grad_out_MD, lse_M, delta_M, K, V, position_M, whole_first, whole_end, TABLE,
        WEIGHT, scale, rate, factor, keys, window, HEAD_DIM, BLOCK_D, BLOCK_N, KIND, WEIGHTED, WINDOWED,
        False, PRECISION, UPCAST)
    grad_MD = by_query_span(
        grad_MD, q_MD, grad_out_MD, lse_M, delta_M, K, V, position_M, whole_end, end, TABLE, WEIGHT,
        scale, rate, factor, keys, window, HEAD_DIM, BLOCK_D, BLOCK_N, KIND, WEIGHTED, WINDOWED, True,
        PRECISION, UPCAST)
    store_rows(GRAD_Q + rows * HEAD_DIM, grad_MD * score_scale, query_M, queries, HEAD_DIM, BLOCK_D)


@triton.jit
def by_key_span(
    grad_k_ND, grad_v_ND, grad_scale_N, grad_rate_N, k_ND, v_ND, key_N, Q, GRAD_OUT, LSE, DELTA, begin,
    end, TABLE, WEIGHT, scale, rate, factor, queries, keys, offset, window, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, KIND: tl.constexpr, LEARNED: tl.constexpr,
    WEIGHTED: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add the query tiles of [begin, end) to the gradients of a block of keys.

    Tiles are [keys, queries] here: the probabilities then enter the products without a transpose.
    """
    for start in range(begin, end, BLOCK_M):
        query_M = start + tl.arange(0, BLOCK_M)
        q_MD = load_rows(Q, query_M, queries, HEAD_DIM, BLOCK_D)
        grad_out_MD = load_rows(GRAD_OUT, query_M, queries, HEAD_DIM, BLOCK_D)
        lse_M = tl.load(LSE + query_M, mask=query_M < queries, other=float("inf"))
        delta_M = tl.load(DELTA + query_M, mask=query_M < queries, other=0.0)
        distance = offset + query_M[None, :] - key_N[:, None]
        raw = dot(k_ND, tl.trans(q_MD), PRECISION, UPCAST) * factor
        scores, weight = finish_scores(
            raw, distance, TABLE, WEIGHT, scale, rate, keys - 1, window, KIND, WEIGHTED, WINDOWED,
            MASKED)
        p = tl.exp2(scores - lse_M[None, :])
        grad_v_ND += dot(p.to(grad_out_MD.dtype), grad_out_MD, PRECISION, UPCAST)
        grad_p = dot(v_ND, tl.trans(grad_out_MD), PRECISION, UPCAST)
        grad_scores = p * (grad_p - delta_M[None, :])
        if LEARNED:
            f = falloff(distance, rate, KIND)
            grad_scale_N += tl.sum(grad_scores * f, 1)
            if KIND != "linear":
                grad_rate_N += tl.sum(grad_scores * falloff_slope(distance, f, rate, KIND), 1)
        grad_raw = grad_scores * weight
        grad_k_ND += dot(grad_raw.to(q_MD.dtype), q_MD, PRECISION, UPCAST)
    return grad_k_ND, grad_v_ND, grad_scale_N, grad_rate_N


@triton.jit
def by_key(
    Q, K, V, GRAD_OUT, LSE, DELTA, GRAD_K, GRAD_V, PARTS, TABLE, WEIGHT, SCALE, RATE, factor,
    score_scale, heads, queries, keys, offset, window, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, LEARNED: tl.constexpr,
    WEIGHTED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One block of keys of one head: GRAD_K, GRAD_V; where LEARNED, a pair of PARTS [programs, 2].

    The pair sums grad_scores * f and grad_scores * df/drate over this program's tiles.
    """
    blocks = tl.cdiv(keys, BLOCK_N)
    sample_head = (tl.program_id(0) // blocks).to(tl.int64)
    start = (
        tl.program_id(0) % blocks * BLOCK_N
    )  # early keys are seen by the most queries: they go first
    head = sample_head % heads
    key_N = start + tl.arange(0, BLOCK_N)
    rows = sample_head * queries
    Q += rows * HEAD_DIM
    GRAD_OUT += rows * HEAD_DIM
    LSE += rows
    DELTA += rows
    if KIND == "table":
        TABLE += head * keys
    if WEIGHTED:
        WEIGHT += head * keys
    scale, rate = closed_numbers(SCALE, RATE, head, KIND)
    columns = sample_head * keys * HEAD_DIM
    k_ND = load_rows(K + columns, key_N, keys, HEAD_DIM, BLOCK_D)
    v_ND = load_rows(V + columns, key_N, keys, HEAD_DIM, BLOCK_D)
    grad_k_ND = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_v_ND = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_scale_N = tl.zeros((BLOCK_N,), tl.float32)
    grad_rate_N = tl.zeros((BLOCK_N,), tl.float32)

    # Query tiles: the first that sees a key; the first that sees all keys; with a window, the end of
    # those that see all keys; the end of those that see any.
    first = tl.maximum(0, start - offset) // BLOCK_M * BLOCK_M
    whole_first = tl.cdiv(tl.maximum(0, start + BLOCK_N - 1 - offset), BLOCK_M) * BLOCK_M
    end = queries
    whole_end = queries
    if WINDOWED:
        end = tl.minimum(queries, start + BLOCK_N - 1 + window - offset)
        whole_end = tl.maximum(0, start + window - offset) // BLOCK_M * BLOCK_M
        whole_end = tl.maximum(whole_end, whole_first)
    grad_k_ND, grad_v_ND, grad_scale_N, grad_rate_N = by_key_span(
        grad_k_ND, grad_v_ND, grad_scale_N, grad_rate_N, k_ND, v_ND, key_N, Q, GRAD_OUT, LSE, DELTA,
        first, tl.minimum(whole_first, end), TABLE, WEIGHT, scale, rate, factor, queries, keys, offset,
        window, HEAD_DIM, BLOCK_D, BLOCK_M, KIND, LEARNED, WEIGHTED, WINDOWED, True, PRECISION, UPCAST)
    grad_k_ND, grad_v_ND, grad_scale_N, grad_rate_N = by_key_span(
        grad_k_ND, grad_v_ND, grad_scale_N, grad_rate_N, k_ND, v_ND, key_N, Q, GRAD_OUT, LSE, DELTA,
        whole_first, tl.minimum(whole_end, end), TABLE, WEIGHT, scale, rate, factor, queries, keys,
        offset, window, HEAD_DIM, BLOCK_D, BLOCK_M, KIND, LEARNED, WEIGHTED, WINDOWED, False, PRECISION,
        UPCAST)
    if WINDOWED:
        grad_k_ND, grad_v_ND, grad_scale_N, grad_rate_N = by_key_span(
            grad_k_ND, grad_v_ND, grad_scale_N, grad_rate_N, k_ND, v_ND, key_N, Q, GRAD_OUT, LSE, DELTA,
            whole_end, end, TABLE, WEIGHT, scale, rate, factor, queries, keys, offset, window, HEAD_DIM,
            BLOCK_D, BLOCK_M, KIND, LEARNED, WEIGHTED, WINDOWED, True, PRECISION, UPCAST)
    store_rows(GRAD_K + columns, grad_k_ND * score_scale, key_N, keys, HEAD_DIM, BLOCK_D)
    store_rows(GRAD_V + columns, grad_v_ND, key_N, keys, HEAD_DIM, BLOCK_D)
    if LEARNED:
        pair = PARTS + tl.program_id(0).to(tl.int64) * 2
        tl.store(pair, tl.sum(grad_scale_N, 0))
        tl.store(pair + 1, tl.sum(grad_rate_N, 0))


@triton.jit
def skew_sums(tile_MN, POINTER, BLOCK: tl.constexpr):
    """Sums along the diagonals of a square tile: i - j = c to POINTER[c], i - j = c - BLOCK to the next row.

    Row i is rotated by i, which brings the two diagonals c and c - BLOCK into column c.
    """
    i_M = tl.arange(0, BLOCK)
    c_N = tl.arange(0, BLOCK)
    rotated = tl.gather(tile_MN, (i_M[:, None] - c_N[None, :]) & (BLOCK - 1), 1)
    lower = i_M[:, None] >= c_N[None, :]
    tl.store(POINTER + c_N, tl.sum(tl.where(lower, rotated, 0.0), 0))
    tl.store(POINTER + BLOCK + c_N, tl.sum(tl.where(lower, 0.0, rotated), 0))


@triton.jit
def by_distance(
    Q, K, V, GRAD_OUT, LSE, DELTA, TABLE_SUMS, WEIGHT_SUMS, TABLE, WEIGHT, SCALE, RATE, factor, heads,
    queries, keys, offset, window, diagonals, first_diagonal, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, TABLE_LEARNED: tl.constexpr,
    WEIGHTED: tl.constexpr, WEIGHT_LEARNED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One diagonal of square tiles of one head: gradients of table and weight, summed by distance.

    All tiles of such a diagonal show the same distances in the same places, so their score gradients
    are added tile on tile, and only the total is summed along its own diagonals, into
    [programs, 2, BLOCK]: distances `base ... base + BLOCK - 1` and the BLOCK below them.
    """
    diagonal = tl.program_id(0) % diagonals + first_diagonal
    sample_head = (tl.program_id(0) // diagonals).to(tl.int64)
    head = sample_head % heads
    rows = sample_head * queries
    Q += rows * HEAD_DIM
    GRAD_OUT += rows * HEAD_DIM
    LSE += rows
    DELTA += rows
    K += sample_head * keys * HEAD_DIM
    V += sample_head * keys * HEAD_DIM
    if KIND == "table":
        TABLE += head * keys
    if WEIGHTED:
        WEIGHT += head * keys
    scale, rate = closed_numbers(SCALE, RATE, head, KIND)
    step = tl.arange(0, BLOCK)
    distance = offset + diagonal * BLOCK + step[:, None] - step[None, :]
    table_MN = tl.zeros((BLOCK, BLOCK), tl.float32)
    weight_MN = tl.zeros((BLOCK, BLOCK), tl.float32)
    first = tl.maximum(0, diagonal)
    end = tl.minimum(tl.cdiv(queries, BLOCK), tl.cdiv(keys, BLOCK) + diagonal)
    for block in range(first, end):
        query_M = block * BLOCK + step
        key_N = (block - diagonal) * BLOCK + step
        q_MD = load_rows(Q, query_M, queries, HEAD_DIM, BLOCK_D)
        k_ND = load_rows(K, key_N, keys, HEAD_DIM, BLOCK_D)
        raw = dot(q_MD, tl.trans(k_ND), PRECISION, UPCAST) * factor
        scores, weight = finish_scores(
            raw, distance, TABLE, WEIGHT, scale, rate, keys - 1, window, KIND, WEIGHTED, WINDOWED, True)
        lse_M = tl.load(LSE + query_M, mask=query_M < queries, other=float("inf"))
        delta_M = tl.load(DELTA + query_M, mask=query_M < queries, other=0.0)
        p = tl.exp2(scores - lse_M[:, None])
        grad_out_MD = load_rows(GRAD_OUT, query_M, queries, HEAD_DIM, BLOCK_D)
        v_ND = load_rows(V, key_N, keys, HEAD_DIM, BLOCK_D)
        grad_p = dot(grad_out_MD, tl.trans(v_ND), PRECISION, UPCAST)
        grad_scores = p * (grad_p - delta_M[:, None])
        if TABLE_LEARNED:
            table_MN += grad_scores
        if WEIGHT_LEARNED:
            weight_MN += grad_scores * raw
    place = tl.program_id(0).to(tl.int64) * 2 * BLOCK
    if TABLE_LEARNED:
        skew_sums(table_MN, TABLE_SUMS + place, BLOCK)
    if WEIGHT_LEARNED:
        skew_sums(weight_MN, WEIGHT_SUMS + place, BLOCK)
