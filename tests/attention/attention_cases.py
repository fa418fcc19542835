"""Inputs, gradients and hand-made methods for the attention tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_patches import attention, positions
from megatron_patches.positions import Geometry, PositionMethod, build

HEADS, HEAD_DIM = 3, 8
ANYWHERE = ("reference", "chunked")  # these refuse nothing and need nothing but torch


def make(name: str, heads: int = HEADS, head_dim: int = HEAD_DIM, **options: Any) -> PositionMethod:
    """What starts at zero, and would prove nothing, is filled: with slopes along its last dimension.

    Where a table of counts has kinks, gradients jump if float32 rounds a count to their other side.
    """
    if "span" in positions.options(name):  # drawn distances, not many times as wide as the texts
        options.setdefault("span", 1024)
    if "initial_length" in positions.options(name):  # some rows by distance alone, others beyond
        options.setdefault("initial_length", 24.5)
    method = build(
        name,
        heads=heads,
        head_dim=head_dim,
        hidden_size=heads * head_dim,
        max_length=512,
        **options,
    )
    for parameter in method.parameters():
        if not parameter.any():
            slope = torch.randn(
                parameter[..., :1].shape, generator=torch.Generator().manual_seed(5)
            )
            parameter.data.copy_(slope * torch.linspace(-1, 1, parameter.shape[-1]))
    return method


def tensors(
    queries: int,
    keys: int | None = None,
    *,
    batch: int = 1,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Tensor]:
    """q [B, H, queries, D], k and v [B, H, keys, D]; the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (queries, *[queries if keys is None else keys] * 2)
    sizes = [(batch, heads, length, head_dim) for length in lengths]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]


def attend(q: Tensor, k: Tensor, v: Tensor, method: PositionMethod, **arguments: Any) -> Tensor:
    """As the package's, with gates from an input that depends on the position, for methods that need it."""
    if method.gated and "gates" not in arguments:
        keys, width = k.shape[2], method.geometry.hidden_size
        phase = torch.arange(keys, dtype=torch.float64)[:, None] * 0.7 + torch.arange(width) * 1.3
        hidden = phase.sin().expand(q.shape[0], keys, width).to(q.device, k.dtype)
        log_decay, gain = method.decay(hidden)
        if gain is not None:
            first = arguments.get("query_offset")
            first = keys - q.shape[2] if first is None else first
            gain = gain[:, :, first : first + q.shape[2]]
        arguments["gates"] = (log_decay, gain)
    return attention.attend(q, k, v, method, **arguments)


def padding(batch: int, keys: int, sides: Sequence[int]) -> Tensor:
    """One row a number: n > 0 pads n keys on the right, n < 0 on the left, n >= keys all of them."""
    mask = torch.zeros(batch, keys, dtype=torch.bool)
    for row, count in zip(mask, sides, strict=True):
        if count > 0:
            row[max(0, keys - count) :] = True
        elif count < 0:
            row[:-count] = True
    return mask


def outcome(
    impl: str, method: PositionMethod, qkv: Sequence[Tensor], **arguments: Any
) -> tuple[Tensor, list[Tensor | None]]:
    """Output and gradients of q, k, v and every parameter, for one fixed upstream gradient."""
    leaves = [t.detach().requires_grad_() for t in qkv]
    out = attend(*leaves, method, impl=impl, **arguments)
    generator = torch.Generator().manual_seed(99)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    wanted = [*leaves, *(p for p in method.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
    return out.detach(), list(grads)


def assert_same(
    found: tuple[Tensor, list[Tensor | None]],
    expected: tuple[Tensor, list[Tensor | None]],
    tolerance: float,
    budget: tuple[Tensor, list[Tensor | None]] | None = None,
) -> None:
    """Outputs and all gradients agree, relative to the largest number of each tensor.

    Gradients of parameters are sums over all rows and keys: four times the tolerance. `budget` is what the
    oracle gives in the same dtype: being as close as that is always enough, for some sums cancel.
    """
    everything = [(out, *grads) for out, grads in (found, expected, budget or expected)]
    for index, (ours, theirs, allowed) in enumerate(zip(*everything, strict=True)):
        if ours is None or theirs is None or allowed is None:
            # None and zeros both say: no effect. The oracle may not even touch a table that `chunked`
            # reads, and the other way round.
            assert all(t is None or not t.any() for t in (ours, theirs)), f"tensor {index}"
            continue
        if not theirs.numel():
            continue
        wide = theirs.double()
        limit = tolerance * max(1.0, float(wide.abs().max())) * (4 if index > 3 else 1)
        limit = max(limit, float((allowed.double() - wide).abs().max()))
        error = float((ours.double() - wide).abs().max())
        assert error <= limit, f"tensor {index} is off by {error:.2g}, allowed {limit:.2g}"


class Slanted(PositionMethod):
    """Tier positional, for tests: the distance counts less the later the query stands."""

    tier = "positional"

    def __init__(self, heads: int = HEADS, head_dim: int = HEAD_DIM) -> None:
        super().__init__(Geometry(heads=heads, head_dim=head_dim, hidden_size=heads * head_dim))
        self.rate = torch.nn.Parameter(torch.linspace(0.1, 1.0, heads).view(heads, 1, 1))
        self.head_dim_of["rate"] = 0

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor:
        assert query_position is not None
        return -self.rate * distance / (1.0 + query_position[:, None]).sqrt()


class Counting(PositionMethod):
    """Tier content, for tests: as CoPE does, position is how many later visible keys pass a gate.

    Also reads the query, so that a wrong or badly cut one shows.
    """

    tier = "content"

    def __init__(self, heads: int = HEADS, head_dim: int = HEAD_DIM) -> None:
        super().__init__(Geometry(heads=heads, head_dim=head_dim, hidden_size=heads * head_dim))
        self.slope = torch.nn.Parameter(torch.linspace(0.05, 0.5, heads).view(heads, 1, 1))
        self.head_dim_of["slope"] = 0

    def score(
        self,
        scores_BHQK: Tensor,
        distance_QK: Tensor,
        query_position_Q: Tensor,
        *,
        query_BHQD: Tensor,
        visible_QK: Tensor,
    ) -> Tensor:
        gates = torch.sigmoid(scores_BHQK) * visible_QK
        later = gates.flip(-1).cumsum(-1).flip(-1)
        strength = 1.0 + query_BHQD.mean(-1, keepdim=True).square()
        return (
            scores_BHQK - self.slope * later * strength / (1.0 + query_position_Q[:, None]).sqrt()
        )
