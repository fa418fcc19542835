"""Position parameters while they train: legal after every update, whole when they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_patches.positions import PositionMethod


def whole(parameters: Iterable[torch.nn.Parameter], *, write: bool) -> Any:
    """A context in which the parameters are whole: ZeRO 3 may leave a slice on each rank.

    With `write`, what the first rank changes inside reaches the others.
    """
    # Small ones usually stay whole; gathering those would end with DeepSpeed slicing them.
    sliced = [p for p in parameters if hasattr(p, "ds_id") and not p.numel()]
    if not sliced:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(sliced, modifier_rank=0 if write else None)


def _parameters(methods: Sequence[PositionMethod]) -> list[torch.nn.Parameter]:
    return [parameter for method in methods for parameter in method.parameters()]


def begin(methods: Iterable[PositionMethod], step: int) -> None:
    """Tell the methods how many updates there were; before each one, in a continued training too."""
    for method in methods:
        method.step = step


def project(methods: Sequence[PositionMethod], optimizer: Any) -> None:
    """Move the methods' parameters back into their bounds; all ranks call it after every update.

    `optimizer` is DeepSpeed's: in half precision and under ZeRO it updates copies of its own and
    overwrites the parameters with them, so these are moved as well.
    """
    methods = [method for method in methods if method.bounds]
    bounded: list[tuple[torch.nn.Parameter, float, float]] = []
    with whole(_parameters(methods), write=True):
        for method in methods:
            for name, (low, high) in method.bounds.items():
                bounded.append((method.get_parameter(name), low, high))
        # Looking at values waits for a GPU: only where putting them back is dear.
        outside = [
            (p, low, high)
            for p, low, high in bounded
            if _partitioned(p) and bool(((p < low) | (p > high)).any())
        ]
        for method in methods:
            method.project_()
    for parameter, low, high in bounded:
        copy = _half_precision_copy(optimizer, parameter)
        if copy is not None:
            copy.clamp_(low, high)
    for parameter, low, high in outside:
        _project_partitioned(parameter, low, high)


def _half_precision_copy(optimizer: Any, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The float32 copy that DeepSpeed's half-precision optimizers update at ZeRO 0, or None."""
    for index, group in enumerate(getattr(optimizer, "fp16_groups", None) or ()):
        start = 0
        for place, member in enumerate(group):
            if member is parameter:
                if hasattr(optimizer, "fp32_groups"):
                    master: torch.Tensor = optimizer.fp32_groups[index][place].data
                    return master
                if hasattr(optimizer, "fp32_groups_flat"):
                    flat: torch.Tensor = optimizer.fp32_groups_flat[index].data
                    return flat.narrow(0, start, parameter.numel()).view_as(parameter)
            start += member.numel()
    return None


def _partitioned(parameter: torch.nn.Parameter) -> bool:
    """Whether ZeRO, or DeepSpeed's bfloat16 optimizer, updates slices of a copy."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def _project_partitioned(parameter: torch.nn.Parameter, low: float, high: float) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    value = safe_get_full_fp32_param(parameter)
    if value is not None:
        safe_set_full_fp32_param(parameter, value.clamp(low, high))


# bfloat16 has steps of 0.8%: a bound that is rounded to it is not left.
ROUNDING = 0.01


@torch.no_grad()
def outside(methods: Sequence[PositionMethod]) -> list[str]:
    """A line for each stored parameter beyond its bounds, or not finite. All ranks call it.

    After `project` there is none: memory, a disk or another program changed it.
    """
    found = []
    with whole(_parameters(methods), write=False):
        for layer, method in enumerate(methods):
            place = f"layer {layer}'s " if len(methods) > 1 else ""
            for name, (low, high) in method.bounds.items():
                values = method.get_parameter(name).float()
                inside = (values >= low - ROUNDING * abs(low)) & (
                    values <= high + ROUNDING * abs(high)
                )
                if not bool((inside & torch.isfinite(values)).all()):
                    worst = values[~(inside & torch.isfinite(values))].flatten()[0].item()
                    found.append(
                        f"position parameter {place}{name} holds {worst:.6g}, outside of its bounds "
                        f"[{low:g}, {high:g}]"
                    )
    return found


def statistics(
    methods: Mapping[int, PositionMethod] | Sequence[PositionMethod],
    all_heads: Callable[[Tensor, int], Tensor] | None = None,
) -> dict[str, float]:
    """`position/<parameter>_mean|std|min|max`, `position/layerN/...` where layers have their own.

    All ranks call it: under ZeRO 3 they put the parameters together.

    Args:
        methods: one for all layers, or one a layer; a mapping gives the numbers of the layers.
        all_heads: as in `PositionMethod.statistics`.
    """
    layers = methods if isinstance(methods, Mapping) else dict(enumerate(methods))
    with whole(_parameters([*layers.values()]), write=False):
        found = {layer: method.statistics(all_heads) for layer, method in layers.items()}
    if len(layers) == 1 and not isinstance(methods, Mapping):
        return {f"position/{k}": v for k, v in found[0].items()}
    return {f"position/layer{i}/{k}": v for i, own in found.items() for k, v in own.items()}
