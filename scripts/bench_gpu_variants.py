"""The contestants of `bench_gpu.py` and their inputs.

A variant takes the inputs and returns a call without arguments, or raises RuntimeError where it cannot.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import NamedTuple

import bench_common  # noqa: F401  (puts the repository on the path)
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_patches.attention import triton as ours
from megatron_patches.attention.problem import Problem, Sight
from megatron_patches.attention.windows import window_of
from megatron_patches.positions import PositionMethod, build

LONGEST = 32768
Work = Callable[[], Tensor]


class Inputs(NamedTuple):
    problem: Problem
    grad_out: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.problem.q, self.problem.k, self.problem.v

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.qkv, *(p for p in self.problem.method.parameters() if p.requires_grad)]


def make_method(name: str, heads: int, head_dim: int) -> PositionMethod:
    return build(
        name, heads=heads, head_dim=head_dim, hidden_size=heads * head_dim, max_length=LONGEST
    )


def make_inputs(
    name: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    window: int | None = None,
) -> Inputs:
    """Queries, keys and values of `[batch, heads, length, head_dim]`, the same numbers everywhere."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    method = make_method(name, shape[1], shape[3]).to(device)
    q, k, v = (t.to(device).requires_grad_() for t in (q, k, v))
    problem = Problem(q, k, v, method, 1 / math.sqrt(shape[3]), Sight(window=window_of(window)))
    return Inputs(problem, grad_out.to(device))


def sdpa(x: Inputs) -> Work:
    p = x.problem

    def work() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(p.q, p.k, p.v, is_causal=True)

    return work


def dense(x: Inputs) -> Work:
    p, length = x.problem, x.problem.keys
    position = torch.arange(length, device=p.q.device)
    distance = position[:, None] - position[None, :]

    def work() -> Tensor:
        table_HL = p.method.table(length)
        assert table_HL is not None
        mask = table_HL.to(p.q.dtype)[:, distance.clamp(min=0)]
        mask = mask.masked_fill(distance < 0, float("-inf"))
        return F.scaled_dot_product_attention(p.q, p.k, p.v, attn_mask=mask[None])

    needed = (
        6 * p.q.shape[1] * length * length * p.q.element_size()
    )  # mask, scores, their gradients
    if needed > torch.cuda.mem_get_info()[0]:
        raise RuntimeError(f"needs about {needed / 2**30:.0f} GB")
    return work


def flex(x: Inputs) -> Work:
    from megatron_patches.attention import flex as implementation

    reason = implementation.refuses(x.problem)
    if reason is not None:
        raise RuntimeError(reason)
    return lambda: implementation.run(x.problem)


def flash_attn(x: Inputs) -> Work:
    form = x.problem.method.closed_form()
    if form is None or form.kind != "linear":
        raise RuntimeError("has ALiBi alone")
    if importlib.util.find_spec("flash_attn") is None:
        raise RuntimeError("flash-attn is not installed")
    from flash_attn import flash_attn_func

    q, k, v = (t.transpose(1, 2) for t in x.qkv)
    call = flash_attn_func
    return lambda: call(q, k, v, causal=True, alibi_slopes=form.scale).transpose(1, 2)


VARIANTS: dict[str, Callable[[Inputs], Work]] = {
    "sdpa": sdpa,
    "triton": lambda x: lambda: ours.run(x.problem),
    "triton-table": lambda x: lambda: ours.run(x.problem, closed_form=False),
    "flex": flex,
    "dense": dense,
    "flash-attn": flash_attn,
}
