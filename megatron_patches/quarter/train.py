"""Training one model for a fixed number of steps: schedule, log, and the reasons to stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_patches.quarter import machine
from megatron_patches.quarter.batches import Batches
from megatron_patches.quarter.budget import OutOfTime, flops_per_token
from megatron_patches.quarter.plan import PlannedRun
from megatron_patches.quarter.training import Trainer
from megatron_patches.standalone.diagnose import TrainingError, first_cause
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.schedule import learning_rate
from megatron_patches.training import position_state


@dataclass(frozen=True)
class Trained:
    """`seconds` without the set-up; `loss` is the last logged mean."""

    model: GPT
    seconds: float
    loss: float
    passes: float
    peak_bytes: int | None


def train(
    run: PlannedRun,
    batches: Batches,
    steps: int,
    *,
    micro: int,
    attention: str,
    device: torch.device,
    now: Callable[[], float],
    end: float,
    log: Callable[[dict[str, Any]], None],
) -> Trained:
    """Train for `steps` steps on `batches`, which were made for as many.

    `log` gets the standalone engine's keys every `log_interval` steps; `now` and `end` are seconds of
    one clock. Raises OutOfTime at `end`, TrainingError when a loss is not finite.
    """
    training = replace(run.training, train_iters=steps, lr_decay_iters=steps)
    trainer = Trainer(replace(run, training=training), device, attention)
    trainer.model.train()
    machine.forget_peak(device)
    machine.synchronize(device)
    begun = since = now()
    chain, loss, losses = "", math.nan, []
    for step in range(steps):
        if now() > end:
            raise OutOfTime(f"out of time: training stopped at step {step} of {steps}")
        rate = learning_rate(training, step)  # type: ignore[arg-type]
        mean, norm = trainer.step(batches.rows(step), rate, micro)
        chain = batches.consume(chain, step)
        losses.append(mean)
        done = step + 1
        if done % training.log_interval and done != steps:
            continue
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            cause = first_cause(trainer.model, None)
            raise TrainingError(f"loss is not finite at step {done} of {steps}: {cause}")
        log(
            {
                "iteration": done,
                "lm_loss": loss,
                "learning_rate": rate,
                "gradient_norm": float(norm),
                "tokens": done * training.tokens_per_step,
                **_speed(len(losses), now() - since, training.tokens_per_step),
                "consumed_sha": chain,
                **position_state.statistics(trainer.model.own_methods()),
            }
        )
        since, losses = now(), []
    machine.synchronize(device)
    seconds = now() - begun
    trainer.model.zero_grad(
        set_to_none=True
    )  # the models of all methods stay until they are scored
    return Trained(trainer.model, seconds, loss, batches.passes, machine.peak_bytes(device))


def _speed(steps: int, seconds: float, tokens: int) -> dict[str, float]:
    rate = steps / max(seconds, 1e-9)
    return {"tokens_per_second": rate * tokens, "steps_per_second": rate}


def measured(run: PlannedRun, steps: int, trained: Trained, peak: float | None) -> dict[str, Any]:
    """For the summary: speed, work, memory; `peak` in FLOP/s, where somebody knows it."""
    rate = steps * run.training.tokens_per_step / max(trained.seconds, 1e-9)
    achieved = rate * flops_per_token(run.shape, run.training.seq_length, training=True)
    return {
        "parameters": run.parameters,
        "training_seconds": trained.seconds,
        "tokens_per_second": rate,
        "tflops": achieved / 1e12,
        "model_flops_utilisation": None if peak is None else achieved / peak,
        "last_loss": trained.loss,
        "passes": trained.passes,
        "peak_bytes": trained.peak_bytes,
    }
