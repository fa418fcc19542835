"""Before anything is measured in earnest: which attention, how many sequences at once, how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_patches.quarter import machine
from megatron_patches.quarter.budget import Speed
from megatron_patches.quarter.evaluation import LONGEST_TIMED, HeldOut, seconds_a_token
from megatron_patches.quarter.plan import PlanError, PlannedRun
from megatron_patches.quarter.probe import Choice
from megatron_patches.quarter.training import Trainer, use_attention

WARM_UP, TIMED = 3, 6  # steps


@dataclass(frozen=True)
class Calibration:
    """`micro`: sequences of one forward pass in training; the same for all methods."""

    micro: int
    speeds: dict[str, Speed]  # by the run's name
    peak_bytes: int | None  # of the device in the calibration; None on the CPU


def calibrate(
    runs: tuple[PlannedRun, ...],
    text: HeldOut,
    choice: Choice,
    device: torch.device,
    say: Callable[[str], None],
) -> Calibration:
    """Time every run's model at the largest micro batch that all of them have memory for."""
    micro = runs[0].training.batch
    speeds: dict[str, Speed] = {}
    while len(speeds) < len(runs):
        run = runs[len(speeds)]
        try:
            speeds[run.name] = _time(run, text, choice, device, micro)
            continue
        except torch.OutOfMemoryError as error:
            if micro == 1:
                raise PlanError(
                    f"{run.name}: one sequence has no room on {device}: {error}"
                ) from None
        # Only here, where the exception no longer holds the tensors of its frames.
        torch.cuda.empty_cache()
        micro, speeds = micro // 2, {}
        say(f"out of memory: {micro} sequences at a time")
    return Calibration(micro, speeds, machine.peak_bytes(device))


def _time(
    run: PlannedRun, text: HeldOut, choice: Choice, device: torch.device, micro: int
) -> Speed:
    training = run.training
    begun = time.perf_counter()
    trainer = Trainer(run, device, choice.names["training"])
    machine.synchronize(device)
    setup = time.perf_counter() - begun
    # Random tokens: the time of a step does not depend on them.
    generator = torch.Generator().manual_seed(0)
    size = (training.batch, training.seq_length + 1)
    rows = torch.randint(run.shape.vocabulary, size, generator=generator).to(device)
    rate = training.optimizer.params.lr / 100
    for _ in range(WARM_UP):
        trainer.step(rows, rate, micro)
    machine.synchronize(device)
    begun = time.perf_counter()
    for _ in range(TIMED):
        trainer.step(rows, rate, micro)
    machine.synchronize(device)
    step = (time.perf_counter() - begun) / TIMED
    model = trainer.model.eval()
    use_attention(model, choice.names["evaluation"])
    readable = [n for n in text.windows.lengths if n <= text.windows.longest]
    shortest = min(readable)
    longest = max(n for n in readable if n <= max(LONGEST_TIMED, shortest))
    seconds = [(n, seconds_a_token(model, text, n, device)) for n in (shortest, longest)]
    return Speed.of(step, setup, seconds[0], seconds[1])
