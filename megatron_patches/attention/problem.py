"""One attention call after its arguments were checked, and the masks that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_patches.attention.gates import Gates
from megatron_patches.attention.windows import Sliding, Window
from megatron_patches.positions import PositionMethod


@dataclass(frozen=True)
class Sight:
    """Who sees whom: query i stands at position `offset + i` and sees no later key, within `window`."""

    offset: int = 0
    window: Window | None = None
    padding: Tensor | None = None  # bool [B, K], True at padding
    eps: float = 0.0  # share of a query's weight that an implementation may leave out
    # int64 [B], for tier `positional` under padding: the key with which each row's text begins, counted
    # from the start of the whole call whatever part of it this is.
    first_token: Tensor | None = None

    def first_key(self, query: int) -> int:
        """The first key that this query, or any later one, can see."""
        return 0 if self.window is None else self.window.first_key(self.offset + query)

    @property
    def distances(self) -> int | None:
        """A key is seen at distances below this; None: the distance alone hides none."""
        return self.window.width if isinstance(self.window, Sliding) else None

    def visible(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Distances int64 [Q, K], negative for the future, and which keys are seen, without padding."""
        query_Q1 = torch.arange(self.offset, self.offset + queries, device=device)[:, None]
        key_K = torch.arange(keys, device=device)
        seen = query_Q1 >= key_K
        if self.window is not None:
            seen = seen & self.window.visible(query_Q1, key_K)
        return query_Q1 - key_K, seen

    def chunks(self, queries: int, size: int) -> Iterator[tuple[int, int]]:
        """`[first, last)` of at most `size` queries, all of which see every key from `first_key(first)` on.

        Except those that `distances` and causality hide.
        """
        first = 0
        while first < queries:
            last = min(first + size, queries)
            left = None if self.window is None else self.window.queries_left(self.offset + first)
            if left is not None:
                last = min(last, first + left)
            yield first, last
            first = last


@dataclass(frozen=True)
class Problem:
    """`q_BHQD`, `k_BHKD`, `v_BHKD` with everything that decides the outcome."""

    q: Tensor
    k: Tensor
    v: Tensor
    method: PositionMethod
    scale: float
    sight: Sight
    gates: Gates | None = None

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 stays float64; everything else is computed in float32."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and (
            self.q.requires_grad
            or self.k.requires_grad
            or self.v.requires_grad
            or any(parameter.requires_grad for parameter in self.method.parameters())
            or (self.gates is not None and self.gates.total.requires_grad)
        )

    def transform(self) -> Problem:
        """The same problem after `method.transform` at the true positions of queries and keys.

        The hook takes queries and keys of one length, so the queries are set into a block as long as
        the keys when there are fewer of them (a cached decode passes `transformed=True` instead, unless the
        method's cache is raw). Padding does not count into the length of a row, and counts as zeros here
        already: a NaN there would reach the gradient of a factor that the hook learns.
        """
        clean = self.without_padding_values() if self.method.transforms else self
        positions = torch.arange(self.keys, device=self.q.device)
        q, k, last = clean.q, clean.k, self.sight.offset + self.queries
        if self.queries < self.keys:
            padded_q = q.new_zeros(*q.shape[:2], self.keys, q.shape[3])
            padded_q[:, :, self.sight.offset : last] = q
            q = padded_q
        padding = self.sight.padding
        length = self.keys if padding is None else (~padding).sum(1)
        if padding is not None and self.method.follows_length:
            positions = ((~padding).cumsum(1) - 1).clamp(min=0)
        q, k = self.method.transform(q, k, positions, total_length=length)
        return replace(clean, q=q[:, :, self.sight.offset : last], k=k)

    def without_padding_values(self) -> Problem:
        """Zeros under the padding: a NaN there would survive a zero weight.

        Queries, too: in the backward a NaN in one of them reaches the gradient of every key it sees.
        """
        if self.sight.padding is None:
            return self
        hidden_B1K1 = self.sight.padding[:, None, :, None]
        hidden_B1Q1 = hidden_B1K1[:, :, self.sight.offset : self.sight.offset + self.queries]
        return replace(
            self,
            q=self.q.masked_fill(hidden_B1Q1, 0),
            k=self.k.masked_fill(hidden_B1K1, 0),
            v=self.v.masked_fill(hidden_B1K1, 0),
        )

    def samples(self, some: slice) -> Problem:
        """The part of the problem that belongs to some samples of the batch."""
        padding, first = self.sight.padding, self.sight.first_token
        sight = replace(
            self.sight,
            padding=None if padding is None else padding[some],
            first_token=None if first is None else first[some],
        )
        return replace(self, q=self.q[some], k=self.k[some], v=self.v[some], sight=sight)

    def split(self, count: int) -> tuple[Problem, Problem]:
        """The first `count` queries and the others, each with all keys up to its last query."""
        end = self.sight.offset + count
        padding = self.sight.padding
        before = replace(self.sight, padding=None if padding is None else padding[:, :end])
        after = replace(self.sight, offset=end)
        return (
            replace(
                self,
                q=self.q[:, :, :count],
                k=self.k[:, :, :end],
                v=self.v[:, :, :end],
                sight=before,
            ),
            replace(self, q=self.q[:, :, count:], sight=after),
        )

    def rows(self, first: int, last: int) -> Problem:
        """The part of the problem that belongs to queries `[first, last)`, with the keys they can see."""
        sight = self.sight
        start, end = sight.first_key(first), sight.offset + last
        padding = None if sight.padding is None else sight.padding[:, start:end]
        return replace(
            self,
            q=self.q[:, :, first:last],
            k=self.k[:, :, start:end],
            v=self.v[:, :, start:end],
            sight=replace(sight, offset=sight.offset + first - start, padding=padding),
            gates=None if self.gates is None else self.gates.rows(first, last, start, end),
        )


def dense(problem: Problem) -> Tensor:
    """Attention by its definition, `[queries, keys]` scores and all; any tier, any dtype.

    `problem` is checked and transformed.
    """
    problem = problem.without_padding_values()
    q, k, v = (t.to(problem.compute_dtype) for t in (problem.q, problem.k, problem.v))
    scores = (q @ k.transpose(-1, -2)) * problem.scale
    return (weights(problem, scores) @ v).to(problem.q.dtype)


def weights(problem: Problem, scores: Tensor, first_key: int = 0) -> Tensor:
    """What becomes of scaled products of queries and keys: `[B, H, Q, K]`, a row sums to 1.

    A row that padding leaves without any key is 0. Of queries, keys and values only the queries are
    read, by methods that do.

    Args:
        problem: as in `dense`.
        scores: `scale * q k^T`, float32 or float64; stays as it is.
        first_key: position of `problem.k[:, :, 0]` in the whole sequence; methods of tier
            `positional` need true query positions, distances do not care.
    """
    method, dtype, sight = problem.method, scores.dtype, problem.sight
    device = scores.device
    query_Q = torch.arange(sight.offset, sight.offset + problem.queries, device=device)
    distance_QK, visible = sight.visible(problem.queries, problem.keys, device)
    if sight.padding is not None:
        visible = visible[None, None] & ~sight.padding[:, None, None, :]
    distance_QK = distance_QK.clamp(min=0)
    query_position_Q = query_Q + first_key

    stretched = method.stretch(problem.keys)
    taken_QK = distance_QK if stretched is None else stretched.to(device)[distance_QK]

    weight = method.weight(taken_QK)
    if weight is not None:
        scores = scores * weight.to(dtype)
    bias = _bias(method, taken_QK, query_position_Q, sight.first_token)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if problem.gates is not None:
        scores = scores + problem.gates.term(sight.offset, problem.queries).to(dtype)
    if method.rewrites_scores:
        query = problem.q.to(dtype)
        scores = method.score(
            scores, distance_QK, query_position_Q, query_BHQD=query, visible_QK=visible
        )
    # A finite filler instead of -inf: a row without any visible key becomes zeros, not NaN. Only padding
    # makes such rows; in all others the softmax of the filler is 0.
    # `where` is half again as fast as `masked_fill`, and hides a future product that overflowed, too.
    probabilities = torch.softmax(torch.where(visible, scores, torch.finfo(dtype).min), dim=-1)
    if sight.padding is not None:
        probabilities = torch.where(visible, probabilities, 0.0)
    return probabilities


def _bias(
    method: PositionMethod, distance_QK: Tensor, position_Q: Tensor, first_token_B: Tensor | None
) -> Tensor | None:
    """The bias `[H, Q, K]`; `[B, H, Q, K]` where padding before a text shifts the positions in it."""
    if first_token_B is None:
        return method.bias(distance_QK, position_Q)
    rows = [
        method.bias(distance_QK, (position_Q - first).clamp(min=0))
        for first in first_token_B.tolist()
    ]
    found = [row for row in rows if row is not None]
    return torch.stack(found) if found else None
