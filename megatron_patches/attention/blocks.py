"""The pieces of work that `chunked` cuts attention into, and the softmax of one of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FORWARD_CHUNK = 256  # queries per call; larger chunks compute more of the masked future
BACKWARD_CHUNK = 128
FORWARD_BYTES = 1 << 21  # keys and values of the heads of one call should stay in the cache
# Floats in the masks of one such call where gates make one a sample: as many as a head of 16384 keys has.
GATED_SCORES = 1 << 22
LOG2E = 1.4426950408889634
# Floats in one block of scores. On the CPU 1 MB, the second-level cache. Elsewhere the number of kernel
# launches decides, not a cache: 512 MB take a training batch of 128 x 12 heads x 512 keys, or 8 heads of
# 131072 keys, in one go; with the handful of tensors of that size at once it stays near 2 GB.
BACKWARD_SCORES = 1 << 18
BACKWARD_SCORES_ELSEWHERE = 1 << 27
# The same for methods that read whole rows of all heads: scores and their gradient, 16 MB each on the CPU,
# 128 MB elsewhere.
WHOLE_ROWS = 1 << 22
WHOLE_ROWS_ELSEWHERE = 1 << 25
WHOLE_ROWS_CHUNK = 64  # queries at most, on the CPU: fewer of the future
FEWEST_ROWS = (
    16  # fewer than these only when samples go one by one: every piece touches all of k and v
)
# Floats that such a method itself works with at a time: 4 MB, of which one step of it touches a part.
# Smaller pieces cost more calls than they save memory traffic. Elsewhere it takes all rows of a piece.
WORKED_ON = 1 << 20


def block_shape(batch: int, heads: int, keys: int, device: str = "cpu") -> tuple[int, int]:
    """Samples and heads whose scores of one chunk are computed together on this type of device."""
    scores = BACKWARD_SCORES if device == "cpu" else BACKWARD_SCORES_ELSEWHERE
    budget = max(1, scores // (BACKWARD_CHUNK * keys))
    samples = min(batch, budget)
    return samples, max(1, min(heads, budget // samples))


def blocks(
    batch: int, heads: int, keys: int, eps: float, device: str = "cpu"
) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and heads to compute together; single heads where they may skip keys."""
    samples, group = block_shape(batch, heads, keys, device)
    group = 1 if eps else group
    for first_sample in range(0, batch, samples):
        for first_head in range(0, heads, group):
            yield (
                slice(first_sample, min(first_sample + samples, batch)),
                slice(first_head, min(first_head + group, heads)),
            )


def forward_blocks(
    q: Tensor, keys: int, eps: float, *, gated: bool
) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and heads for one call of the fused kernel; with gates each has a mask of its own."""
    batch, heads = q.shape[0], q.shape[1]
    samples, group = batch, FORWARD_BYTES // (2 * batch * keys * q.shape[3] * q.element_size())
    if gated:
        masks = max(1, GATED_SCORES // (FORWARD_CHUNK * keys))
        samples = min(batch, masks)
        group = masks // samples
    group = 1 if eps else max(1, min(heads, group))
    for first_sample in range(0, batch, samples):
        for first_head in range(0, heads, group):
            yield (
                slice(first_sample, min(first_sample + samples, batch)),
                slice(first_head, min(first_head + group, heads)),
            )


def whole_rows(batch: int, heads: int, keys: int, device: str = "cpu") -> tuple[int, int]:
    """Samples and queries to compute together where neither keys nor heads can be split."""
    budget, chunk = WHOLE_ROWS, WHOLE_ROWS_CHUNK
    if device != "cpu":
        budget, chunk = WHOLE_ROWS_ELSEWHERE, BACKWARD_CHUNK
    row = heads * keys
    samples = min(batch, max(1, budget // (FEWEST_ROWS * row)))
    return samples, min(chunk, max(1, budget // (samples * row)))


def rows_worked_on(row: int, floats_per_score: int, rows: int, device: str = "cpu") -> int:
    """Of `rows` queries with `row` scores each, those that a method goes through at a time."""
    return max(1, min(rows, WORKED_ON // (row * floats_per_score))) if device == "cpu" else rows


def probabilities(
    q_NCD: Tensor,
    kT_NDE: Tensor,
    bias_GCE: Tensor,
    weight_GCE: Tensor | None,
    padding_SE: Tensor | None,
    scale: float,
    samples: int,
) -> tuple[Tensor, Tensor | None]:
    """Softmax of one chunk, `[samples, group, rows, keys]`, and its scaled scores where a factor acts.

    A bias of four dimensions, one for samples before the others, is overwritten.
    """
    group, rows, width = bias_GCE.shape[-3:]
    shape = (samples, group, rows, width)
    raw = None
    if weight_GCE is None:
        scores = bias_GCE
        if bias_GCE.dim() < len(shape):
            # Not `contiguous`: of one query and one head the view of the table is so already.
            scores = bias_GCE.expand(shape).clone(memory_format=torch.contiguous_format)
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


def probabilities_again(
    q_NCD: Tensor, kT_NDE: Tensor, bias2_GCE: Tensor, lse2_SGC1: Tensor, scale: float
) -> Tensor:
    """The same from the forward's log-sum-exp, `[samples, group, rows, keys]`; no factor, no padding.

    `bias2` and `lse2` are in units of log 2. On the CPU `exp` is up to 35 times slower where its result
    is denormal, as it is for far keys under a steep bias; `exp2` is not.
    """
    scores = bias2_GCE - lse2_SGC1
    flat = scores.view(-1, *bias2_GCE.shape[-2:])
    flat.baddbmm_(q_NCD, kT_NDE, alpha=scale * LOG2E).exp2_()
    return scores
