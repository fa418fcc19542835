"""Fused attention with a learned bias on a GPU, in Triton: linear memory, deterministic to the bit.

The bias is read from the 1-D table by distance or, where a method gives its `closed_form`, computed
in the kernel from two numbers a head. Per tile of scores, forward takes 2 matrix products; backward
takes 3 for the queries and 4 for keys and values, which are left out when neither they nor the
numbers of a closed form need a gradient. A learned table or weight costs 2 more, in a kernel of its
own; the numbers of a closed form cost no product, only one pair of sums a program.

float32 inputs are multiplied exactly as `torch.get_float32_matmul_precision` says: "highest", torch's
default, is true float32; the others allow TF32.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from megatron_patches.attention._triton_launch import (
    LOG2E,
    Call,
    Launch,
    backward_kernels,
    blocks_of,
    is_roomy,
    kernels,
    programs,
)
from megatron_patches.attention.problem import Problem
from megatron_patches.attention.windows import Blockwise
from megatron_patches.positions._once import first_order

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 128
LN2 = math.log(2.0)


def refuses(problem: Problem) -> str | None:
    """Why this problem cannot run here and what to do instead, or None if it can."""
    method, q = problem.method, problem.q
    if method.tier != "table":
        return (
            f"triton reads a bias by distance (tier 'table'); {method.name} is of tier "
            f"{method.tier!r}: use chunked or reference"
        )
    if isinstance(problem.sight.window, Blockwise):
        return "triton has sliding windows only, not blockwise ones: use chunked"
    if problem.sight.padding is not None:
        return (
            "triton has no key_padding_mask: use chunked, or pad on the right and ignore those rows"
        )
    if q.dtype not in DTYPES:
        return f"triton takes float16, bfloat16 and float32, not {q.dtype}: cast, or use chunked"
    if q.shape[3] > LARGEST_HEAD:
        return f"triton takes head dimensions up to {LARGEST_HEAD}, not {q.shape[3]}: use chunked"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton (it comes with torch for CUDA), or use chunked"
    if q.device.type == "cpu" and not kernels().INTERPRETED:
        return (
            "triton needs a GPU and q is on the CPU: use chunked (or, to try the kernels slowly, set "
            "TRITON_INTERPRET=1 before python starts)"
        )
    if q.device.type not in ("cpu", "cuda"):
        return f"triton is not supported on {q.device.type}: use chunked or reference"
    if q.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(q.device)
        if capability < (8, 0):
            return (
                "triton needs compute capability 8.0 (A100, RTX 30) or later, this GPU has "
                f"{capability[0]}.{capability[1]}: use chunked"
            )
    return None


def run(problem: Problem, *, closed_form: bool = True) -> Tensor:
    """`out_BHQD`, differentiable once.

    Args:
        problem: checked, transformed, and one that `refuses` has nothing against.
        closed_form: False reads the table also where the method has a closed form.
    """
    q, k, v = (t.contiguous() for t in (problem.q, problem.k, problem.v))
    method, keys, sight = problem.method, problem.keys, problem.sight
    table_HL = scale_H = rate_H = None
    kind = "none"
    form = method.closed_form() if closed_form else None
    if form is not None:
        kind = form.kind
        # f is log2(1 + rate d) for "log", so the base is changed already; the others need the factor.
        scale_H = form.scale.float() * (1.0 if kind == "log" else LOG2E)
        rate_H = None if form.rate is None else form.rate.float()
    else:
        table_HL = method.table(keys)
        if table_HL is not None:
            kind, table_HL = "table", table_HL.float() * LOG2E
    weight_HL = method.weight_table(keys)
    width = sight.distances
    window = width if width is not None and width < keys else None
    blocks = blocks_of(q.dtype, q.shape[3], is_roomy(q.device))
    call = Call(kind, problem.scale, sight.offset, window, blocks)
    out: Tensor = _Fused.apply(
        *(q, k, v, _plain(table_HL), _plain(weight_HL), _plain(scale_H), _plain(rate_H), call)
    )
    return out


def _plain(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.float().contiguous()


class _Fused(torch.autograd.Function):
    """Saves q, k, v, the output and the log-sum-exp of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table_HL: Tensor | None,
        weight_HL: Tensor | None,
        scale_H: Tensor | None,
        rate_H: Tensor | None,
        call: Call,
    ) -> Tensor:
        out = torch.empty_like(q)
        lse_BHQ = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        launch = Launch.of(q, k, weight_HL is not None, call)
        block_m, block_n = call.blocks.forward
        with torch.cuda.device_of(q):  # triton launches on the current device
            kernels().forward[(programs(q, block_m),)](
                *(q, k, v, out, lse_BHQ, table_HL, weight_HL, scale_H, rate_H),
                **launch.arguments(),
                BLOCK_M=block_m,
                BLOCK_N=block_n,
            )
        ctx.save_for_backward(q, k, v, table_HL, weight_HL, scale_H, rate_H, out, lse_BHQ)
        ctx.call, ctx.launch = call, launch
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table_HL, weight_HL, scale_H, rate_H, out, lse_BHQ = ctx.saved_tensors
        _, needs_k, needs_v, needs_table, needs_weight, needs_scale, needs_rate, _ = (
            ctx.needs_input_grad
        )
        blocks, shared = ctx.call.blocks, ctx.launch.arguments()
        grad_out = grad_out.contiguous()
        held, walked = blocks.backward
        delta_BHQ = torch.empty_like(lse_BHQ)
        grads: list[Tensor | None] = [torch.empty_like(q), None, None, None, None, None, None]
        numbers = (table_HL, weight_HL, scale_H, rate_H)
        common = {**shared, "score_scale": ctx.call.score_scale}
        with torch.cuda.device_of(q):
            backward_kernels().by_query[(programs(q, held),)](
                *(q, k, v, out, grad_out, lse_BHQ, delta_BHQ, grads[0], *numbers),
                **common,
                BLOCK_M=held,
                BLOCK_N=walked,
            )
            learned = needs_scale or needs_rate
            if needs_k or needs_v or learned:
                grads[1], grads[2] = torch.empty_like(k), torch.empty_like(v)
                parts = lse_BHQ.new_empty(programs(k, held), 2) if learned else None
                backward_kernels().by_key[(programs(k, held),)](
                    *(q, k, v, grad_out, lse_BHQ, delta_BHQ, grads[1], grads[2], parts, *numbers),
                    **common,
                    BLOCK_M=walked,
                    BLOCK_N=held,
                    LEARNED=learned,
                )
                if parts is not None:
                    grads[5:7] = _closed_gradients(parts, q.shape, scale_H, rate_H, ctx.call.kind)
            if needs_table or needs_weight:
                grads[3:5] = _distance_gradients(
                    (q, k, v, grad_out, lse_BHQ, delta_BHQ),
                    numbers,
                    ctx.call,
                    shared,
                    (needs_table, needs_weight),
                )
        # grads[0] carries no cost of its own: its kernel also computes what the others need.
        return (
            *(g if n else None for g, n in zip(grads, ctx.needs_input_grad, strict=False)),
            None,
        )


def _closed_gradients(
    parts_P2: Tensor, shape: torch.Size, scale_H: Tensor, rate_H: Tensor | None, kind: str
) -> list[Tensor | None]:
    """Gradients of the base-2 scale and of the rate from one pair of sums a program.

    A base-2 bias counts ln(2) in natural units. The kernel leaves the constant of df/drate to us:
    log2(e) for "log", ln(2) for "power".
    """
    sums_H2 = parts_P2.view(shape[0], shape[1], -1, 2).sum((0, 2)) * -LN2
    rate = None
    if rate_H is not None:
        rate = scale_H * sums_H2[:, 1] * (LOG2E if kind == "log" else LN2)
    return [sums_H2[:, 0], rate]


def _distance_gradients(
    tensors: tuple[Tensor, ...],
    numbers: tuple[Tensor | None, ...],
    call: Call,
    shared: dict[str, Any],
    needs: tuple[bool, bool],
) -> list[Tensor | None]:
    """Gradients [H, L] of the base-2 table and of the weight, each by distance.

    The buffer of partial sums takes 2 floats a sample, head and distance.
    """
    q, k, block = tensors[0], tensors[1], call.blocks.diagonal
    (batch, heads, queries), keys = q.shape[:3], k.shape[2]
    # Diagonal c of the tiles holds distances offset + c * block - (block - 1) ... + (block - 1).
    first = -((call.offset + block - 1) // block)
    sight = keys if call.window is None else call.window
    last = min(-(-queries // block) - 1, (sight + block - 2 - call.offset) // block)
    count = last - first + 1
    sums = [
        q.new_empty(batch, heads, count, 2, block, dtype=torch.float32) if need else None
        for need in needs
    ]
    backward_kernels().by_distance[(batch * heads * count,)](
        *(*tensors, *sums, *numbers),
        **shared,
        diagonals=count,
        first_diagonal=first,
        BLOCK=block,
        TABLE_LEARNED=needs[0],
        WEIGHT_LEARNED=needs[1],
    )
    found: list[Tensor | None] = []
    for pairs in sums:
        if pairs is None:
            found.append(None)
            continue
        pairs_HC2N = pairs.sum(0)
        # A distance lies in two neighbouring diagonals: in the upper half of one, the lower of the next.
        by_distance = pairs_HC2N[:, :, 0].clone()
        by_distance[:, :-1] += pairs_HC2N[:, 1:, 1]
        visible = by_distance.flatten(1)[:, -(call.offset + first * block) :][:, :keys]
        grad = q.new_zeros(heads, keys, dtype=torch.float32)
        grad[:, : visible.shape[1]] = visible * LN2
        found.append(grad)
    return found
