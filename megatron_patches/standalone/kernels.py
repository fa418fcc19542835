"""The learned position kernels of a model as data: one row a head."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_patches.analysis.kernels import THRESHOLD
from megatron_patches.analysis.rows import KernelRow, append_kernels
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
    config_sha: str | None = None,
) -> list[KernelRow]:
    """Bias and weight of every head at distances up to `longest`; empty for methods with neither.

    Methods outside tier `table` have no kernel of the distance alone and give no rows. `options` are
    those that the model was trained with, `config_sha` is that of the training: they tell variants
    and runs apart.
    """
    size = sum(parameter.numel() for parameter in model.parameters())
    methods = list(dict.fromkeys(model.methods))
    rows: list[KernelRow] = []
    for layer, method in enumerate(methods):
        shared = len(methods) == 1
        rows += _of_method(method, config, step, longest, None if shared else layer)
    said: dict[str, Any] = {
        "options": dict(options or {}),
        "config_sha": config_sha,
        "model_parameters": size,
    }
    return [replace(row, **said) for row in rows]


def run_kernels(model: GPT, config: Config, step: int, path: str | Path) -> list[KernelRow]:
    """`kernel_rows` of the run in `path`. The window of a scoring does not change what was learned."""
    # Inside: a bare machine, which has no pydantic, reads kernels as well.
    from megatron_patches.standalone.evaluate import trained_options
    from megatron_patches.standalone.provenance import trained_sha

    options, sha = trained_options(config), trained_sha(path, config)
    return kernel_rows(model, config, step, options=options, config_sha=sha)


def effective_lengths(bias_HL: torch.Tensor) -> list[int | None]:
    """The first distance of each head at which bias(d) - bias(0) is below THRESHOLD, else None.

    `bias_HL` holds the bias of every head at the distances 0 ... L-1. A constant added to a head's
    bias changes no attention weight, so what counts is how far it has fallen.
    """
    below_HL = bias_HL - bias_HL[:, :1] < THRESHOLD
    first = below_HL.int().argmax(dim=1).tolist()
    return [d if found else None for d, found in zip(first, below_HL.any(dim=1), strict=True)]


def write_kernels(path: str | Path, rows: Sequence[KernelRow]) -> None:
    """A file of these rows alone, whole or not at all; it is there even where there are none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.touch()
        append_kernels(partial, rows)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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
    table_HL = method.bias(torch.arange(longest + 1, device=at.device))
    ends = [None] * method.owned_heads if table_HL is None else effective_lengths(table_HL)
    per_head = {n: p for n, p in method.named_parameters() if method.head_dim_of.get(n) == 0}
    return [
        KernelRow(
            method=config.pos_emb,
            dataset=config.dataset_name,
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
