"""Inputs, gradients and hand-made methods for the attention tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.positions import Geometry, PositionMethod, build

HEADS, HEAD_DIM = 3, 8


def make(name: str, heads: int = HEADS, head_dim: int = HEAD_DIM, **options: Any) -> PositionMethod:
    return build(
        name, heads=heads, head_dim=head_dim, hidden_size=heads * head_dim, max_length=512, **options
    )


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
) -> None:
    """Outputs and all gradients agree, relative to the largest number of each tensor."""
    pairs = [(found[0], expected[0]), *zip(found[1], expected[1], strict=True)]
    for index, (ours, theirs) in enumerate(pairs):
        if ours is None or theirs is None:
            # None and zeros both say: no effect. The oracle may not even touch a table that `chunked`
            # reads, and the other way round.
            rest = ours if ours is not None else theirs
            assert rest is None or not rest.any(), f"tensor {index}"
            continue
        scale = max(1.0, float(theirs.double().abs().max())) if theirs.numel() else 1.0
        error = float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0
        assert error <= tolerance * scale, f"tensor {index} is off by {error:.2g} of {scale:.2g}"


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
        return scores_BHQK - self.slope * later * strength / (1.0 + query_position_Q[:, None]).sqrt()
