"""From this suite's configuration to the YAML file that GPT-NeoX reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_patches.config import Batch, Config, dump, from_mapping

FILE = "neox.yml"  # in the run's folder


def neox_config(
    config: Config, batch: Batch, processes: int, *, cpu: bool, port: int, start: Path | None
) -> Config:
    """The same run with everything written out that NeoX would otherwise guess differently.

    Args:
        batch: of the whole run; NeoX divides by the processes that it believes to see.
        processes: of this host, for runs on the CPU, where NeoX counts GPUs.
        cpu: gloo and no GPU.
        port: where the processes meet; NeoX's default is the same for all runs of a host.
        start: the step folder to load, of this run or of another; None: none.
    """
    values: dict[str, Any] = yaml.safe_load(dump(config))
    if start is not None:
        # NeoX takes the run's folder and the number of the step apart.
        number = int(start.name.removeprefix("global_step"))
        values.update(load=str(start.parent), iteration=number)
        if start.parent == config.save_dir:  # as in the standalone engine: the run continues
            values["finetune"] = False
    if config.checkpoint_factor is not None or config.extra_save_iters is not None:
        values["save"] = str(config.save_dir)
    values["precision"] = config.effective_precision
    # NeoX stops, or trains nothing, where these are missing; ours have defaults.
    params = config.optimizer.params
    written = config.optimizer.model_dump(mode="json", exclude_unset=True)
    values["optimizer"] = {
        **written,
        "type": config.optimizer.type,
        "params": {
            "lr": params.lr,
            "betas": list(params.betas),
            "eps": params.eps,
            **written.get("params", {}),
        },
    }
    values["zero_optimization"] = {"stage": 0, **(config.zero_optimization or {})}
    if config.effective_precision != "fp16":
        # NeoX reads `fp16: {enabled: true, type: bfloat16}` of older files as fp16.
        values.pop("fp16", None)
    values.update(
        train_batch_size=batch.global_,
        train_micro_batch_size_per_gpu=batch.micro,
        gradient_accumulation_steps=batch.accumulation,
        master_port=port,
    )
    if cpu:
        values["distributed_backend"] = "gloo"
        if config.hostfile is None:
            values["num_gpus"] = processes
    return from_mapping(values, FILE)
