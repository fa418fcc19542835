"""How far back a head must look, so that the keys left out weigh less than eps together.

Where a bias falls fast, far keys carry next to no weight. For query i the weight of key j is
`exp(s_ij) / Z_i`. Cauchy-Schwarz bounds the content part of every score,
`s_ij <= scale |q_i| K_i + b[d]` with K_i the largest norm among the keys so far, and the query's own
key bounds the sum, `Z_i >= exp(s_ii)`. Keys at distance w and beyond therefore weigh at most

    exp(scale |q_i| K_i - s_ii) * sum over d >= w of exp(b[d]),

and the smallest w for which that is below eps, for all queries of a chunk, is where its keys may start. The
output then differs by at most `2 eps max|v|` from the exact one.

Gates add a term that never rises towards older keys. Where it falls so far that even the largest
content could not lift a weight above float32's smallest number, the key's weight is 0 already: leaving
it out changes nothing, and needs no eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_patches.attention.gates import Gates
from megatron_patches.attention.problem import Sight

# (first query, last query, heads) -> first key
FirstKey = Callable[[int, int, slice], int]

UNDERFLOW = {torch.float32: 110.0, torch.float64: 750.0}  # exp(-x) is 0 from about 104 and 745 on
# torch's fused kernel takes keys in blocks of this size. Whole blocks left out, all others stay as they
# are, and with them every bit of the output: a later key cannot show in an earlier row.
KERNEL_KEYS = 512
MARGIN = 1e-3  # in the exponent: rounding of norms and scores in float32


class Reach:
    """First keys of chunks of queries, for one call of attention without padding."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        table_HL: Tensor,
        weight_HL: Tensor | None,
        scale: float,
        sight: Sight,
    ) -> None:
        self.sight = sight
        dtype = table_HL.dtype
        tail_HL = table_HL.detach().clone()
        if sight.window is not None:
            tail_HL[:, sight.window.span :] = float("-inf")
        # log of the sum of exp(b) over all distances from d on; falls with d whatever the bias does
        self.tail_HL = tail_HL.flip(-1).logcumsumexp(-1).flip(-1)
        last = sight.offset + q.shape[2]
        own_k = k[:, :, sight.offset : last]
        own_BHQ = scale * (q.to(dtype) * own_k.to(dtype)).sum(-1)
        norm_BHK = torch.linalg.vector_norm(k[:, :, :last].to(dtype), dim=-1)
        largest_BHQ = norm_BHK.cummax(-1).values[:, :, sight.offset :]
        bound_BHQ = scale * torch.linalg.vector_norm(q.to(dtype), dim=-1) * largest_BHQ
        if weight_HL is not None:
            own_BHQ = own_BHQ * weight_HL[:, 0, None]
            bound_BHQ = bound_BHQ * weight_HL.abs().amax(-1)[:, None]
        slack_BHQ = own_BHQ + table_HL[:, 0, None] - bound_BHQ
        # Rounding of the norms and scores themselves, where they are huge.
        rounding = 8 * torch.finfo(dtype).eps
        slack_BHQ = slack_BHQ - rounding * (bound_BHQ.abs() + own_BHQ.abs())
        # Whatever the sample, a chunk of a head has one first key: the most demanding query decides.
        self.limit_HQ = slack_BHQ.amin(0) + math.log(sight.eps) - MARGIN

    def first_key(self, first: int, last: int, heads: slice) -> int:
        """The first key that queries `[first, last)` of these heads need."""
        limit_H = self.limit_HQ[heads, first:last].amin(-1)
        width = int((self.tail_HL[heads] > limit_H[:, None]).sum(-1).max())
        return max(self.sight.first_key(first), self.sight.offset + first - width + 1, 0)


class GateReach:
    """First keys of chunks of queries whose weights gates leave above zero; without padding."""

    def __init__(
        self, q: Tensor, k: Tensor, table_HL: Tensor, gates: Gates, scale: float, sight: Sight
    ) -> None:
        self.sight, self.gates, dtype = sight, gates, table_HL.dtype
        norm_BHK = torch.linalg.vector_norm(k.to(dtype), dim=-1).cummax(-1).values
        largest_BHQ = norm_BHK[:, :, sight.offset : sight.offset + q.shape[2]]
        bound_BHQ = scale * torch.linalg.vector_norm(q.to(dtype), dim=-1) * largest_BHQ
        lift_H = table_HL.amax(-1) - table_HL[:, 0]
        # How far below its own key's score the term must be: content may differ by twice the bound.
        self.fall_BHQ = (2.01 * bound_BHQ + lift_H[:, None] + UNDERFLOW[dtype]).double()

    def first_key(self, first: int, last: int, heads: slice) -> int:
        """The first key that queries `[first, last)` of these heads need."""
        total = self.gates.total[:, heads]
        fall = self.fall_BHQ[:, heads, first:last].amax(-1)
        if self.gates.gain is not None:
            gain = self.gates.gain[:, heads, first:last].double().amin(-1)
            fall = torch.where(gain > 0, fall / gain, float("inf"))
        # Totals fall along the keys, and the first query of the chunk is nearest to old ones.
        lowest = (total[..., self.sight.offset + first] + fall)[..., None]
        needed = int(torch.searchsorted(-total.contiguous(), -lowest).min())
        return needed // KERNEL_KEYS * KERNEL_KEYS


def first_keys(
    q: Tensor,
    k: Tensor,
    table_HL: Tensor,
    weight_HL: Tensor | None,
    gates: Gates | None,
    scale: float,
    sight: Sight,
) -> FirstKey:
    """Where the keys of a chunk of queries start: by the bound above if `sight.eps` allows it.

    Under padding nothing is left out: a query's own key bounds its weights only if it is visible.
    """
    found: list[FirstKey] = [lambda first, last, heads: sight.first_key(first)]
    if sight.padding is None:
        if sight.eps and (gates is None or gates.falls):  # rising terms would lift far keys
            found.append(Reach(q, k, table_HL, weight_HL, scale, sight).first_key)
        if gates is not None and gates.falls and weight_HL is None:
            found.append(GateReach(q, k, table_HL, gates, scale, sight).first_key)
    return lambda first, last, heads: max(one(first, last, heads) for one in found)
