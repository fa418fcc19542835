"""Position parameters while they train: legal after every update, whole when they are looked at."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from megatron_patches.config import Config
from megatron_patches.standalone.model import GPT


def whole(model: GPT, *, write: bool) -> Any:
    """A context in which position parameters are whole: ZeRO 3 may leave a slice on each rank."""
    # Small ones usually stay whole; gathering those would end with DeepSpeed slicing them.
    sliced = [p for p in model.position_parameters() if hasattr(p, "ds_id") and not p.numel()]
    if not sliced:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters(sliced, modifier_rank=0 if write else None)


def project(model: GPT, config: Config) -> None:
    """Legal position parameters after every update, also in the optimizer's own copies."""
    methods = [method for method in dict.fromkeys(model.methods) if method.bounds]
    outside: list[tuple[torch.nn.Parameter, float, float]] = []
    with whole(model, write=True):
        for method in methods:
            for name, (low, high) in method.bounds.items():
                parameter = method.get_parameter(name)
                if bool(((parameter < low) | (parameter > high)).any()):
                    outside.append((parameter, low, high))
            method.project_()
    if config.zero_stage or config.torch_dtype_name != "float32":
        # ZeRO and half precision update a copy of their own and overwrite the parameter.
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        for parameter, low, high in outside:
            value = safe_get_full_fp32_param(parameter)
            if value is not None:
                safe_set_full_fp32_param(parameter, value.clamp(low, high))


def statistics(model: GPT) -> dict[str, float]:
    """All ranks call it: under ZeRO 3 they put the parameters together."""
    methods = list(dict.fromkeys(model.methods))
    with whole(model, write=False):
        found = [method.statistics() for method in methods]
    if len(methods) == 1:
        return {f"position/{k}": v for k, v in found[0].items()}
    return {f"position/layer{i}/{k}": v for i, own in enumerate(found) for k, v in own.items()}
