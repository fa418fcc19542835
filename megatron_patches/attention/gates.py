"""Decay by gates: gain_i times the log decays between key and query, added to every score.

The sums of log decays reach -36,000 in 16384 tokens, where float32 resolves 0.004 and bfloat16 256. So
they are kept in float64, and only differences are rounded: those to the last query of a run of `RUN`
queries, which are small wherever a key has weight. Between that query and the others of its run lies a
constant a row, which softmax does not see, but float32 does once it is large: where a single token lets
so much fade, every query is its own point of reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

RUN = 32  # queries that share a point of reference; chunks of queries start at multiples of it
STEEP = 16.0  # the largest term of one token with which they do: float32 then resolves 6e-5 within a run


@dataclass(frozen=True)
class Place:
    """Queries `last - 1` ... `first`, in this order, and keys `[start, end)` of some heads."""

    samples: slice
    heads: slice
    offset: int  # position of query 0
    queries: int  # of the whole call
    first: int
    last: int
    start: int
    end: int


@dataclass(frozen=True)
class Gates:
    """`total_BHK`: float64 sums of the log decays up to and with each key; `gain_BHQ`: fp32, or None.

    `falls`: known to be so that terms never rise towards older keys: no log decay is above 0, no gain below.
    `run`: queries that share a point of reference, `RUN` or 1.
    """

    total: Tensor
    gain: Tensor | None
    falls: bool = False
    run: int = RUN

    @classmethod
    def of(
        cls,
        log_decay_BHK: Tensor,
        gain_BHQ: Tensor | None,
        padding: Tensor | None,
        offset: int = 0,
    ) -> Gates:
        """From the log decay of every key and the gain of the queries from position `offset` on.

        Both count as 0 under the padding [B, K].
        """
        if padding is not None:
            log_decay_BHK = log_decay_BHK.masked_fill(padding[:, None], 0)
            if gain_BHQ is not None:
                hidden_BQ = padding[:, offset : offset + gain_BHQ.shape[-1]]
                gain_BHQ = gain_BHQ.masked_fill(hidden_BQ[:, None], 0)
        # Asked on the CPU only: elsewhere the answer would have to come back from the device.
        if log_decay_BHK.device.type != "cpu" or log_decay_BHK.numel() == 0:
            return cls(log_decay_BHK.double().cumsum(-1), gain_BHQ)
        low, high = map(float, log_decay_BHK.detach().aminmax())
        falls, steepest = high <= 0, max(-low, high)
        if gain_BHQ is not None and gain_BHQ.numel():
            low, high = map(float, gain_BHQ.detach().aminmax())
            falls, steepest = falls and low >= 0, steepest * max(-low, high)
        run = 1 if steepest > STEEP else RUN
        return cls(log_decay_BHK.double().cumsum(-1), gain_BHQ, falls, run)

    def term(self, offset: int, queries: int) -> Tensor:
        """float64 [B, H, Q, K]: what is added to the scores of the queries from position `offset` on."""
        own_BHQ = self.total[:, :, offset : offset + queries]
        between = own_BHQ[..., None] - self.total[:, :, None]
        return between if self.gain is None else between * self.gain[..., None]

    def rows(self, first: int, last: int, start: int, end: int) -> Gates:
        """The part for queries `[first, last)` and keys `[start, end)`."""
        gain = None if self.gain is None else self.gain[:, :, first:last]
        return replace(self, total=self.total[:, :, start:end], gain=gain)

    def chunk(self, place: Place) -> Chunk:
        return Chunk(self, place)


@dataclass(frozen=True)
class _Runs:
    """Runs of one length L that lie side by side: `count` of them, R."""

    rows: slice  # of the chunk
    count: int
    between: Tensor  # [S, G, R, 1, E]: the sums between the points of reference and the keys
    gain: Tensor | None  # [S, G, R, L, 1]

    def of(self, chunk: Tensor) -> Tensor:
        """Their part of `[..., C, E]` as `[..., R, L, E]`, a view."""
        found: Tensor = chunk[..., self.rows, :].unflatten(-2, (self.count, -1))
        return found


@dataclass(frozen=True)
class Chunk:
    """The term of one place, and its way back."""

    gates: Gates
    place: Place

    def _runs(self, dtype: torch.dtype) -> Iterator[_Runs]:
        """Whole runs all together; before and after them what the chunk has of others."""
        at, run = self.place, self.gates.run
        total_SGK = self.gates.total[at.samples, at.heads]
        cuts = (-(-at.first // run) * run, at.last // run * run)
        edges = sorted({at.first, at.last, *(min(max(c, at.first), at.last) for c in cuts)})
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            count = max(1, (high - low) // run)
            # the same query wherever the chunk ends, so that forward and backward agree
            reference = at.offset + min(low // run * run + run, at.queries) - 1
            points = slice(reference, reference + count * run, run)
            own_SGR = total_SGK[..., points].flip(-1)
            between = own_SGR[..., None] - total_SGK[..., None, at.start : at.end]
            gain = None
            if self.gates.gain is not None:
                gain = self.gates.gain[at.samples, at.heads, low:high].flip(-1).to(dtype)
                gain = gain.unflatten(-1, (count, -1))[..., None]
            rows = slice(at.last - high, at.last - low)
            yield _Runs(rows, count, between.to(dtype)[..., None, :], gain)

    def added_to(self, bias_GCE: Tensor, unit: float = 1.0) -> Tensor:
        """`[S, G, C, E]`: the bias and `unit` times the term, less a constant a row."""
        some = self.gates.total[self.place.samples, self.place.heads]
        out = bias_GCE.new_empty(*some.shape[:2], *bias_GCE.shape[1:])
        for runs in self._runs(bias_GCE.dtype):
            part, into = runs.of(bias_GCE), runs.of(out)
            if runs.gain is None:
                torch.add(part, runs.between, alpha=unit, out=into)
            else:
                torch.addcmul(part, runs.between, runs.gain, value=unit, out=into)
        return out

    def give_back(
        self, grad_scores_SGCE: Tensor, grad_total: Tensor, grad_gain: Tensor | None
    ) -> None:
        """Add this chunk's share to the gradients of `total` and `gain`.

        A row's score gradients sum to zero but for rounding; its own total takes that sum all the same,
        or the rounding of all rows would add up in the gradients of the first tokens.
        """
        at = self.place
        keys = grad_total[at.samples, at.heads, at.start : at.end]
        if self.gates.gain is None:
            for some in grad_scores_SGCE.split(
                RUN, 2
            ):  # sums of many rows in float32 would round more
                keys -= some.sum(2).to(keys.dtype)
            own = slice(at.offset + at.first, at.offset + at.last)
            grad_total[at.samples, at.heads, own] += (
                grad_scores_SGCE.sum(-1).flip(-1).to(keys.dtype)
            )
            return
        for runs in self._runs(grad_scores_SGCE.dtype):
            queries = slice(at.last - runs.rows.stop, at.last - runs.rows.start)
            part = runs.of(grad_scores_SGCE)
            if grad_gain is not None:
                sums = (part * runs.between).sum(-1).flatten(-2).flip(-1)
                grad_gain[at.samples, at.heads, queries] += sums.to(grad_gain.dtype)
            assert runs.gain is not None
            part = part * runs.gain
            keys -= part.sum(3).to(keys.dtype).sum(2)
            own = slice(at.offset + queries.start, at.offset + queries.stop)
            own_sums = part.sum(-1).flatten(-2).flip(-1)
            grad_total[at.samples, at.heads, own] += own_sums.to(keys.dtype)
