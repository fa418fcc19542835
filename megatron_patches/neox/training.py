"""GPT-NeoX's training loop: legal position parameters, their decay, and what the logs say of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_patches.neox.model import own_methods, position_parameters
from megatron_patches.neox.patches import Patches
from megatron_patches.neox.position import layer_of
from megatron_patches.training import position_state
from megatron_patches.training.log import append, forget_after

GROUP = "position_params"


def apply(patches: Patches) -> None:
    import deepspeed.runtime.engine as engine
    from megatron import logging, training
    from megatron.model import utils

    record = Record()
    patches.wrap(engine, "clip_grad_norm_", record.clip_grad_norm_)
    patches.wrap(utils, "get_params_for_weight_decay_optimization", _parameter_groups)
    patches.wrap(training, "train_step", record.train_step)
    patches.wrap(logging, "training_log", record.training_log)
    patches.wrap(training, "evaluate", record.evaluate)
    patches.wrap(training, "evaluate_and_print_results", record.evaluate_and_print_results)


def _parameter_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_params_for_weight_decay_optimization(module: Any, neox_args: Any) -> Any:
        """NeoX's groups, and the position parameters in a last group of their own.

        They do not decay unless `position_weight_decay` says so, and may keep another dtype.
        """
        groups = original(module, neox_args)
        special = position_parameters(module)
        if not special:
            return groups
        ids = {id(parameter) for parameter in special}
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in ids]
        decay = neox_args.weight_decay if neox_args.position_weight_decay else 0.0
        return [*groups, {"params": special, "weight_decay": decay, "name": GROUP}]

    return get_params_for_weight_decay_optimization


class Record:
    """What happened since the last logged step, and where it is written."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.results: dict[str, Any] = {}
        self.path: Path | None = None
        self.norm: Any = None

    def clip_grad_norm_(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            """In float32 at ZeRO 0 DeepSpeed forgets the norm by which it clips."""
            self.norm = original(*args, **kwargs)
            return self.norm

        return clip_grad_norm_

    def train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            model = kwargs["model"] if "model" in kwargs else args[3]
            out = original(*args, **kwargs)
            methods = own_methods(model.module)
            if methods:
                position_state.project(methods, model.optimizer)
            self.losses.append(out[0]["lm_loss"].detach().float().mean())
            return out

        return train_step

    def training_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def training_log(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            settings = kwargs["neox_args"] if "neox_args" in kwargs else args[0]
            iteration = kwargs["iteration"] if "iteration" in kwargs else args[5]
            if settings.log_interval and iteration % settings.log_interval == 0:
                model = kwargs["model"] if "model" in kwargs else args[9]
                rate = kwargs["learning_rate"] if "learning_rate" in kwargs else args[4]
                self._step(settings, iteration, model, rate)
            return out

        return training_log

    def _step(self, settings: Any, iteration: int, model: Any, rate: float) -> None:
        numbers = statistics(model.module)  # all ranks take part
        loss = float(torch.stack(self.losses).mean()) if self.losses else None
        self.losses.clear()
        if torch.distributed.get_rank() != 0:
            return
        if numbers:
            told = " | ".join(f"{key} {value:.4f}" for key, value in numbers.items())
            print(f" iteration {iteration} | {told}", flush=True)
        for key, value in numbers.items():
            _track(settings, key, value, iteration)
        norm = model.get_global_grad_norm()
        norm, self.norm = self.norm if norm is None else norm, None
        self._write(
            settings,
            {
                "iteration": iteration,
                "lm_loss": loss,
                "learning_rate": rate,
                "gradient_norm": None if norm is None else float(norm),
                "tokens": iteration * settings.train_batch_size * settings.seq_length,
                **numbers,
            },
        )

    def evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self.results = original(*args, **kwargs)
            return self.results

        return evaluate

    def evaluate_and_print_results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            called = signature.bind(*args, **kwargs)
            called.apply_defaults()
            settings, name = called.arguments["neox_args"], called.arguments["chart_name"]
            if torch.distributed.get_rank() == 0 and "lm_loss" in self.results:
                numbers = {
                    "iteration": called.arguments["iteration"],
                    f"{name}_loss": float(self.results["lm_loss"]),
                }
                self._write(settings, numbers)
            return out

        return evaluate_and_print_results

    def _write(self, settings: Any, numbers: dict[str, Any]) -> None:
        """Nothing is written where NeoX itself writes nothing: without `save`."""
        if not settings.save:
            return
        path = Path(settings.save) / "log.jsonl"
        if self.path != path:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A validation before any step: the run had ended here, and its last step stays.
            forget_after(path, int(numbers["iteration"]) - ("lm_loss" in numbers))
            self.path = path
        append(path, numbers)


def statistics(module: Any) -> dict[str, float]:
    """Of all heads and layers, whatever the ranks own; every rank calls it."""
    from megatron import mpu

    def all_heads(values: torch.Tensor, dimension: int) -> torch.Tensor:
        parts = [torch.empty_like(values) for _ in range(mpu.get_model_parallel_world_size())]
        torch.distributed.all_gather(
            parts, values.contiguous(), group=mpu.get_model_parallel_group()
        )
        return torch.cat(parts, dimension)

    methods = own_methods(module)
    if len(methods) == 1 and layer_of(methods[0]) is None:
        return position_state.statistics(methods, all_heads)
    layers = {layer_of(method) or 0: method for method in methods}
    numbers = position_state.statistics(layers, all_heads) if layers else {}
    stages: list[Any] = [numbers]
    if mpu.get_pipe_parallel_world_size() > 1:
        stages = [None] * mpu.get_pipe_parallel_world_size()
        group = mpu.get_pipe_parallel_group()
        torch.distributed.all_gather_object(stages, numbers, group=group)
    return {key: value for stage in stages for key, value in stage.items()}


def _track(settings: Any, key: str, value: float, iteration: int) -> None:
    from megatron.logging import tb_wandb_log

    tb_wandb_log(
        key,
        value,
        iteration,
        use_wandb=settings.use_wandb,
        tensorboard_writer=settings.tensorboard_writer,
        comet_experiment=settings.comet_experiment,
    )
