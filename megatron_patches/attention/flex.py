"""Attention through PyTorch's FlexAttention: one fused kernel, compiled when first needed.

The kernel asks a small function for every score, which looks the bias (and the factor of product
kernels) up in the distance table. Scores arrive there scaled, in float32, whatever the dtype of q is.

On a CPU it infers only, for there FlexAttention has no backward. On a GPU it trains too: the table is a
captured tensor, and its gradient is summed by atomic additions of float32, in no fixed order. Two runs
therefore differ in the last digits of the table's gradient, and of the parameters behind it.

Without gradients one kernel serves all lengths up to a power of two, to which the table is filled up.
With gradients the shapes are constants of the kernel: training has one length, and divisible lengths
then need no bound checks.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_patches.attention.problem import Problem
from megatron_patches.attention.windows import Blockwise

BLOCK = 128  # queries and keys of one block of the mask; FlexAttention's own default
CAPACITY = 2048  # distances in the smallest table of a kernel without gradients
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPU_HEAD_DIM = (16, 256)  # the matrix units start at 16; beyond 256 shared memory runs out

Captured = tuple[Tensor | None, Tensor | None, Tensor | None]  # table, weight table, padding
Lists = tuple[Tensor, Tensor]  # counts [1, 1, rows], indices [1, 1, rows, columns], both int32


def refuses(problem: Problem) -> str | None:
    """The reason why FlexAttention cannot do this and what can, or None."""
    method, device = problem.method, problem.q.device.type
    head_dim, (least, most) = problem.q.shape[3], GPU_HEAD_DIM
    if isinstance(problem.sight.window, Blockwise):
        return "flex has sliding windows only, not blockwise ones; use chunked"
    if method.tier != "table":
        return f"flex reads distance tables, {method.name} is of tier {method.tier}; use chunked"
    if device not in ("cpu", "cuda"):
        return f"flex knows the devices cpu and cuda, not {device}; use chunked"
    if problem.q.dtype not in DTYPES:
        return f"flex computes in float32 at most, not {problem.q.dtype}; use chunked or reference"
    if device == "cuda" and not least <= head_dim <= most:
        return f"flex on a GPU needs head_dim in [{least}, {most}], not {head_dim}; use chunked"
    if device == "cpu" and problem.needs_gradient:
        return (
            "flex has no gradients on a CPU, and q, k, v or a parameter of the position method wants "
            "them; use chunked, or torch.no_grad() for inference"
        )
    if problem.needs_gradient and torch.are_deterministic_algorithms_enabled():
        return (
            "flex sums the gradient of the table in no fixed order, and deterministic algorithms "
            "are demanded (torch.use_deterministic_algorithms); use chunked"
        )
    return None


def run(problem: Problem) -> Tensor:
    """`out_BHQD`; no tensor of queries x keys exists at any time."""
    problem = problem.without_padding_values()
    method, sight, keys = problem.method, problem.sight, problem.keys
    gradients, capacity = problem.needs_gradient, keys
    # contiguous: otherwise each layout of a caller's projections would be compiled for itself.
    q, k, v = (t.contiguous() for t in (problem.q, problem.k, problem.v))
    if not gradients:
        q, k, v = q.detach(), k.detach(), v.detach()
        capacity = max(CAPACITY, 1 << (keys - 1).bit_length())
    # The mode decides what is compiled: one mode without gradients, whoever calls in which.
    with torch.set_grad_enabled(gradients):
        captured = (
            _filled(method.table(keys), capacity),
            _filled(method.weight_table(keys), capacity),
            _filled(sight.padding, capacity),
        )
        family = _Family(
            str(q.device),
            q.dtype,
            q.shape[1],
            q.shape[3],
            problem.scale,
            tuple(None if t is None else tuple(t.shape) for t in captured),
            shape=(q.shape[0], problem.queries, keys) if gradients else None,
        )
        window = keys if sight.distances is None else min(sight.distances, keys)
        size = (problem.queries, keys, sight.offset, window)
        blocks = _blocks(*size, q.device, separate_full=sight.padding is None)
        return _compiled(family)(q, k, v, captured, blocks)


def _filled(rows: Tensor | None, capacity: int) -> Tensor | None:
    """`[rows, capacity]`, zeros behind the known distances or keys; tables in float32."""
    if rows is None:
        return None
    rows = rows.float() if rows.is_floating_point() else rows
    return F.pad(rows, (0, capacity - rows.shape[1])).contiguous()


class _Family(NamedTuple):
    """The constants of a compiled kernel; a `shape` of None stands for all batches and lengths."""

    device: str
    dtype: torch.dtype
    heads: int
    head_dim: int
    scale: float
    captured: tuple[tuple[int, ...] | None, ...]
    shape: tuple[int, int, int] | None


# Partial blocks are masked score by score, full ones are seen whole; both once more, transposed, for the
# backward; then offset and window, int32. As Python numbers each value would get a kernel of its own.
Blocks = tuple[Lists, Lists, Lists, Lists, Tensor, Tensor]


@lru_cache(maxsize=64)
def _blocks(
    queries: int, keys: int, offset: int, window: int, device: torch.device, *, separate_full: bool
) -> Blocks:
    """Which blocks of queries meet which blocks of keys, from the distances at their corners.

    `create_block_mask` would make a mask of queries x keys first: 16384 x 16384 is 268 MB.
    """
    # Cached, so it must not become a tensor of inference mode, which training cannot use later.
    with torch.inference_mode(False), torch.no_grad():
        # Two blocks at least, the second one empty if need be: a size of 1 is compiled for itself.
        rows, columns = (max(2, -(-length // BLOCK)) for length in (queries, keys))
        first_row_R1 = torch.arange(rows, device=device)[:, None] * BLOCK
        last_row_R1 = (first_row_R1 + BLOCK - 1).clamp(max=queries - 1)
        first_key_C = torch.arange(columns, device=device) * BLOCK
        nearest_RC = offset + first_row_R1 - (first_key_C + BLOCK - 1)
        farthest_RC = offset + last_row_R1 - first_key_C
        some_RC = (farthest_RC >= 0) & (nearest_RC < window) & (first_row_R1 < queries)
        full_RC = some_RC & (nearest_RC >= 0) & (farthest_RC < window) & separate_full
        partial_RC = some_RC & ~full_RC
        partial, full = _lists(partial_RC), _lists(full_RC)
        partial_t, full_t = _lists(partial_RC.T), _lists(full_RC.T)
        numbers = [torch.tensor(n, dtype=torch.int32, device=device) for n in (offset, window)]
        return partial, full, partial_t, full_t, numbers[0], numbers[1]


def _lists(wanted_RC: Tensor) -> Lists:
    """Count of the True in each row, and their columns in rising order, followed by the others."""
    count_R = wanted_RC.sum(-1, dtype=torch.int32)
    index_RC = torch.argsort(wanted_RC.int(), dim=-1, descending=True, stable=True)
    return count_R[None, None], index_RC.to(torch.int32)[None, None].contiguous()


@lru_cache(maxsize=64)
def _compiled(family: _Family) -> Callable[[Tensor, Tensor, Tensor, Captured, Blocks], Tensor]:
    with warnings.catch_warnings():
        # The compiler imports this module of torch, which warns about another module of torch.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        importlib.import_module("torch.utils.mkldnn")

    def attention(q: Tensor, k: Tensor, v: Tensor, captured: Captured, blocks: Blocks) -> Tensor:
        table_HL, weight_HL, padding_BK = captured
        partial, full, partial_t, full_t, offset, window = blocks
        for tensor in captured:
            if tensor is not None:
                # The C++ that torch 2.13 generates around captured tensors of variable size has
                # undeclared names in it, depending on how its variables happen to be called.
                torch._dynamo.mark_static(tensor)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            # Partial blocks evaluate the future as well, before it is masked: keep inside the table.
            distance = (m + offset - n).clamp(min=0)
            if weight_HL is not None:
                score = score * weight_HL[h, distance]
            return score if table_HL is None else score + table_HL[h, distance]

        def mask_mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            distance = m + offset - n
            seen = (distance >= 0) & (distance < window)
            return seen if padding_BK is None else seen & ~padding_BK[b, n]

        lengths = (q.shape[2], k.shape[2])
        lists = (*partial, *full, *partial_t, *full_t)
        mask = BlockMask(lengths, *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod)
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, scale=family.scale)

    # torch.compile keeps its kernels with the code object and stops after eight: a copy a family.
    code = attention.__code__.replace(co_name=f"flex_attention_{_compiled.cache_info().misses}")
    own = FunctionType(code, attention.__globals__, code.co_name, None, attention.__closure__)
    # fullgraph: a graph break would run the dense, quadratic form of FlexAttention silently.
    kernel = torch.compile(own, fullgraph=True, dynamic=family.shape is None)
    return cast(Callable[..., Tensor], kernel)
