"""One row of attention at a time, in Python's floats: what methods that rewrite scores must return.

A method's function takes scores [H, keys] of one query and how far away each key is, nearest first, and
the query [H, D]; it returns weights [H, keys]. Keys that the query does not see are not there at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_patches.positions import PositionMethod
from megatron_patches.positions._slopes import alibi_slopes


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def stick_breaking(method: Any, scores: list[list[float]], away: list[int], q: Tensor) -> Tensor:
    """Weights [H, keys]."""
    rows = []
    for row in scores:
        left, weights = 1.0, []
        for score, distance in zip(row, away, strict=True):
            taken = sigmoid(score) * left if distance or method.current else 0.0
            weights.append(taken)
            left -= taken
        weights[0] += left
        rows.append(weights)
    return torch.tensor(rows, dtype=torch.float64)


def cope(method: Any, scores: list[list[float]], away: list[int], q: Tensor) -> Tensor:
    rows = []
    for head, row in enumerate(scores):
        count, changed = 0.0, []
        for score in row:
            count += sigmoid(score)
            at = min(count, method.positions - 1)
            below, above = math.floor(at), math.ceil(at)
            share = at - below
            term = sum(
                float(q[head] @ method.pos_emb[0, :, n]) * part
                for n, part in ((below, 1 - share), (above, share))
            )
            changed.append(score + (term / math.sqrt(q.shape[-1]) if method.divide else term))
        rows.append(changed)
    return torch.tensor(rows, dtype=torch.float64).softmax(-1)


def dape(method: Any, scores: list[list[float]], away: list[int], q: Tensor) -> Tensor:
    heads = len(scores)
    inner, offset = method.mlp2[0].weight.tolist(), method.mlp2[0].bias.tolist()
    outer, slopes = method.mlp2[2].weight.tolist(), alibi_slopes(heads)
    columns = []
    for key, distance in enumerate(away):
        content = [scores[head][key] for head in range(heads)]
        bias = [-slopes[head] * distance for head in range(heads)]
        if method.base == "kerple_log":
            scale, rate = method.bias_p.flatten().tolist(), method.bias_a.flatten().tolist()
            bias = [-scale[h] * math.log(1 + rate[h] * distance) for h in range(heads)]
        hidden = [
            sum(w * x for w, x in zip(row, content + bias, strict=True)) + b
            for row, b in zip(inner, offset, strict=True)
        ]
        hidden = [x if x > 0 else 0.01 * x for x in hidden]
        columns.append(
            [
                content[h] + bias[h] + sum(w * x for w, x in zip(outer[h], hidden, strict=True))
                for h in range(heads)
            ]
        )
    return torch.tensor(columns, dtype=torch.float64).t().softmax(-1)


def ggd_bam_ssmax(method: Any, scores: list[list[float]], away: list[int], q: Tensor) -> Tensor:
    scale, shape, loc, factor = (
        method.get_parameter(key).flatten().tolist() if key != "loc" or method.learn_loc else None
        for key in ("scale", "shape", "loc", "ssmax")
    )
    rows = []
    for head, row in enumerate(scores):
        centre = 0.0 if loc is None else math.exp(loc[head]) - math.exp(-loc[head])
        prior = [-math.exp(scale[head]) * (abs(d + centre) + 1e-5) ** shape[head] for d in away]
        grown = factor[head] * math.log(len(row))
        both = [(s + p) * grown for s, p in zip(row, prior, strict=True)]
        content = [s * grown + p for s, p in zip(row, prior, strict=True)]
        rows.append(both if method.scale_prior else content)
    return torch.tensor(rows, dtype=torch.float64).softmax(-1)


ORACLES: dict[str, Callable[..., Tensor]] = {
    "stick_breaking": stick_breaking,
    "cope": cope,
    "dape": dape,
    "ggd_bam_ssmax": ggd_bam_ssmax,
}


def row_by_row(
    method: PositionMethod, qkv: list[Tensor], window: int | None, padding: Tensor | None
) -> Tensor:
    """Outputs of the queries that see their own key, NaN elsewhere; other keys do not exist."""
    q, k, v = qkv
    out = torch.full_like(q, float("nan"))
    for sample in range(len(q)):
        for i in range(q.shape[2]):
            seen = range(i, max(-1, i - (window or i + 1)), -1)
            keys = [j for j in seen if padding is None or not padding[sample, j]]
            if not keys or keys[0] != i:
                continue
            query = q[sample, :, i]
            scores = (query[:, None] @ k[sample][:, keys].mT)[:, 0] / math.sqrt(q.shape[-1])
            away = [i - j for j in keys]
            weights = ORACLES[method.name](method, scores.tolist(), away, query)
            out[sample, :, i] = (weights[:, None] @ v[sample][:, keys])[:, 0]
    return out
