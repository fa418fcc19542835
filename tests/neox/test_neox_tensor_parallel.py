"""Tensor-parallel ranks own ranges of heads; together they are one process."""

from __future__ import annotations

import pytest
import torch
from neox_tools import (
    INSERTED,
    LEARNED,
    PRODUCT,
    REPLICATED,
    gradients,
    make_args,
    make_method,
    random,
)
from torch import Tensor

from megatron_patches import positions
from megatron_patches.neox import position
from megatron_patches.positions import PositionMethod

pytestmark = pytest.mark.usefixtures("shared")


@pytest.mark.parametrize("name", [name for name in INSERTED if name not in REPLICATED])
def test_two_ranks_together_are_one(name):
    from megatron import mpu

    whole = make_method(name)
    parts = []
    for rank in (0, 1):
        mpu.place(model=(rank, 2))
        parts.append(make_method(name))
    for key, parameter in whole.named_parameters():
        dimension = whole.head_dim_of[key]
        assert dimension is not None
        shards = [part.get_parameter(key) for part in parts]
        assert torch.equal(torch.cat(shards, dimension), parameter)
        for each in (parameter, *shards):
            marks = (each.model_parallel, each.partition_dim, each.partition_stride)
            assert marks == (True, dimension, 1)
    upstream = random(4, 5, 12)
    scores = random(2, 4, 5, 12)

    def outcome(method: PositionMethod, heads: slice) -> tuple[Tensor, dict[str, Tensor]]:
        out = method(5, 12)
        if name in PRODUCT:
            out = position.ScoreHook(method)(scores[:, heads])
        if name in LEARNED:
            (out * upstream[heads]).sum().backward()
        return out, gradients(method)

    out, grads = outcome(whole, slice(0, 4))
    shards = [outcome(part, slice(2 * i, 2 * i + 2)) for i, part in enumerate(parts)]
    assert torch.equal(torch.cat([o for o, _ in shards], 1), out)
    for key, grad in grads.items():
        joined = torch.cat([g[key] for _, g in shards], whole.head_dim_of[key])
        torch.testing.assert_close(joined, grad, rtol=1e-6, atol=1e-6)


def test_what_every_rank_holds_alike_is_marked_so():
    class Shared(PositionMethod):
        name = "shared"

        def __init__(self, geometry):
            super().__init__(geometry)
            self.net = torch.nn.Parameter(torch.ones(3))
            self.head_dim_of["net"] = None

    method = Shared(positions.Geometry(heads=2, head_dim=4, hidden_size=8))
    position.in_attention(method, make_args())
    assert (method.net.model_parallel, method.net.partition_dim) == (False, 0)
