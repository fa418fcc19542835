"""What is trained how: parameter groups, AdamW, and DeepSpeed's engine around both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_patches.standalone import runtime
from megatron_patches.standalone.model import GPT
from megatron_patches.training.first_update import forget_first_update

if TYPE_CHECKING:
    from megatron_patches.config import Batch, Config


def parameter_groups(model: GPT, config: Config) -> list[dict[str, Any]]:
    """NeoX's rule: matrices decay, biases and norms do not. Position parameters decay only on request.

    Position parameters form groups of their own: they stay float32 when the rest is bfloat16.
    """
    decay = config.weight_decay
    special = {id(p) for p in model.position_parameters()}
    position = decay if config.position_weight_decay else 0.0
    groups: dict[tuple[str, float], list[torch.nn.Parameter]] = {}
    for module in model.modules():
        plain = isinstance(module, torch.nn.LayerNorm)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in special:
                continue
            rate = 0.0 if plain or name == "bias" else decay
            members = groups.setdefault((str(parameter.dtype), rate), [])
            if all(parameter is not member for member in members):
                members.append(parameter)
    found = [{"params": params, "weight_decay": rate} for (_, rate), params in groups.items()]
    if special:
        found.append({"params": model.position_parameters(), "weight_decay": position})
    return found


def deepspeed_settings(config: Config, batch: Batch) -> dict[str, Any]:
    """The part of the configuration that DeepSpeed reads itself."""
    settings: dict[str, Any] = {
        "train_batch_size": batch.global_,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": config.zero_optimization or {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,  # the progress display prints
        "wall_clock_breakdown": config.wall_clock_breakdown,
    }
    if config.is_bf16:
        settings["bf16"] = {"enabled": True}
        # DeepSpeed accumulates float32 gradients of bfloat16 weights under ZeRO only.
        wide = {"grad_accum_dtype": "fp32"} if config.zero_stage else None
        if config.data_types or wide:
            settings["data_types"] = config.data_types or wide
    if config.is_fp16:
        given = config.fp16 or {}
        settings["fp16"] = {k: v for k, v in given.items() if k not in ("type", "fp16")}
        settings["fp16"]["enabled"] = True
    return settings


def build_engine(model: GPT, config: Config, batch: Batch, device: torch.device) -> Any:
    """DeepSpeed's engine for `model`, moved to `device` and cast to the configured precision.

    Raises RuntimeError where DeepSpeed has no fp16 on this device.
    """
    params = config.optimizer.params
    deepspeed = runtime.import_deepspeed()
    if config.is_fp16 and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        key = "fp16" if config.precision is None else "precision"
        raise RuntimeError(
            f"{config.place(key)} asks for fp16, which DeepSpeed cannot train on this {device.type}; "
            "write precision: bfloat16 or fp32"
        )
    model.to(device)
    if config.torch_dtype_name != "float32":
        model.to(getattr(torch, config.torch_dtype_name))
        # ZeRO 3 packs all weights into one buffer of one dtype: there the stored position
        # parameters are rounded like the rest (the optimizer's own copies are float32).
        if config.zero_stage < 3:
            model.remember_positions()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config),
        # `learning_rate` sets it before every update; 0 until then, see forget_first_update
        lr=0.0,
        betas=(params.betas[0], params.betas[1]),
        eps=params.eps,
        # one fused kernel on both devices, without DeepSpeed's compilation at first use
        fused=True,
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=deepspeed_settings(config, batch),
        dist_init_required=False,
    )
    forget_first_update(engine.optimizer)
    return engine
