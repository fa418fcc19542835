"""The learned position kernels of a model as data: one row a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_patches.analysis.kernels import THRESHOLD
from megatron_patches.analysis.rows import KernelRow
from megatron_patches.positions import PositionMethod
from megatron_patches.standalone.model import GPT

if TYPE_CHECKING:
    from megatron_patches.config import Config


def sampled_distances(longest: int, per_octave: int = 8) -> list[int]:
    """0, then distances up to `longest` in equal steps of the logarithm."""
    steps = torch.arange(0, 64 * per_octave) / per_octave
    return sorted({0, longest} | {int(d) for d in 2.0**steps if int(d) <= longest})


def kernel_rows(
    model: GPT,
    config: Config,
    step: int,
    longest: int = 16384,
    options: Mapping[str, Any] | None = None,
) -> list[KernelRow]:
    """Bias and weight of every head at distances up to `longest`; empty for methods with neither.

    Methods outside tier `table` have no kernel of the distance alone and give no rows. `options` are
    those of the model's evaluated rows, which tell variants of a method apart.
    """
    methods = list(dict.fromkeys(model.methods))
    rows: list[KernelRow] = []
    for layer, method in enumerate(methods):
        shared = len(methods) == 1
        rows += _of_method(method, config, step, longest, None if shared else layer)
    return [replace(row, options=dict(options or {})) for row in rows]


def effective_lengths(bias_HL: torch.Tensor) -> list[int | None]:
    """The first distance of each head whose bias is below the threshold, None where there is none.

    `bias_HL` holds the bias of every head at the distances 0 ... L-1.
    """
    below_HL = bias_HL < THRESHOLD
    first = below_HL.int().argmax(dim=1).tolist()
    return [d if found else None for d, found in zip(first, below_HL.any(dim=1), strict=True)]


@torch.no_grad()
def _of_method(
    method: PositionMethod, config: Config, step: int, longest: int, layer: int | None
) -> list[KernelRow]:
    if method.tier != "table":
        return []
    distances = sampled_distances(longest)
    at = torch.tensor(
        distances, device=next(iter(method.state_dict().values()), torch.empty(0)).device
    )
    bias_HD, weight_HD = method.bias(at), method.weight(at)
    if bias_HD is None and weight_HD is None:
        return []
    table_HL = method.table(longest + 1)
    ends = [None] * method.owned_heads if table_HL is None else effective_lengths(table_HL)
    per_head = {n: p for n, p in method.named_parameters() if method.head_dim_of.get(n) == 0}
    return [
        KernelRow(
            method=config.pos_emb,
            dataset=config.dataset or "data",
            seed=config.seed,
            step=step,
            head=method.first_head + head,
            parameters={n: float(p[head].flatten()[0]) for n, p in per_head.items()},
            distances=distances,
            bias=None if bias_HD is None else bias_HD[head].tolist(),
            weight=None if weight_HD is None else weight_HD[head].tolist(),
            layer=layer,
            train_length=config.seq_length,
            searched_to=None if table_HL is None else longest,
            effective_length=ends[head],
        )
        for head in range(method.owned_heads)
    ]
