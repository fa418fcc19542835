"""Before anything is measured in earnest: how many sequences at once, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_patches.quarter import machine
from megatron_patches.quarter.batches import Batches
from megatron_patches.quarter.budget import Speed
from megatron_patches.quarter.evaluation import (
    LONGEST_TIMED,
    TOKENS_PER_PASS,
    HeldOut,
    seconds_a_token,
)
from megatron_patches.quarter.plan import PlanError, PlannedRun
from megatron_patches.quarter.training import Trainer

WARM_UP = 3  # steps
TIMED = 5  # steps between two looks at the clock, at least as many as are timed


@dataclass(frozen=True)
class Setting:
    """What all methods share while they are timed; `seconds` of timed steps a method."""

    text: HeldOut
    batches: Mapping[str, Batches]
    attention: str
    device: torch.device
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """Sequences of one forward pass in training and tokens of one in evaluation: of all methods."""

    micro: int
    pass_tokens: int
    speeds: dict[str, Speed]  # by the run's name
    peak_bytes: int | None  # of the device in the calibration; None on the CPU


class _NoRoom(Exception):
    """Training or evaluation, whichever `part` says, ran out of memory."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


def calibrate(
    runs: Sequence[PlannedRun],
    setting: Setting,
    say: Callable[[str], None],
    give_up: Callable[[PlannedRun, Exception], None],
) -> Calibration:
    """Time every run's model at the largest passes that all of them have memory for.

    `give_up` gets a run with any other error; its speed is missing then. Raises PlanError when one
    sequence, or one window, has no room.
    """
    device = setting.device
    sizes = {"training": runs[0].training.batch, "evaluation": TOKENS_PER_PASS[device.type]}
    smallest = {"training": 1, "evaluation": min(setting.text.windows.lengths)}
    speeds: dict[str, Speed] = {}
    waiting = list(runs)
    machine.forget_peak(device)
    while waiting:
        run = waiting.pop(0)
        part = ""
        try:
            speeds[run.name] = _time(run, setting, sizes["training"], sizes["evaluation"])
        except _NoRoom as error:
            part, message = error.part, str(error)
        except Exception as error:  # compilers and drivers raise whatever they like
            give_up(run, error)
        # Only here, where no exception holds the tensors of its frames any more.
        machine.free(device)
        if not part:
            continue
        if sizes[part] <= smallest[part]:
            raise PlanError(
                f"{run.name}: the smallest {part} pass has no room on {device} ({message}): a device "
                "with more memory, or --toy"
            )
        sizes[part] //= 2
        waiting = [other for other in runs if other.name in speeds or other in (run, *waiting)]
        speeds = {}
        unit = "sequences" if part == "training" else "tokens"
        say(f"out of memory in {part}: {sizes[part]} {unit} at a time")
    return Calibration(sizes["training"], sizes["evaluation"], speeds, machine.peak_bytes(device))


def _time(run: PlannedRun, setting: Setting, micro: int, pass_tokens: int) -> Speed:
    try:
        trainer, setup, step = _time_training(run, setting, micro)
    except torch.cuda.OutOfMemoryError as error:
        raise _NoRoom("training", str(error)) from None
    model = trainer.model.eval()
    model.zero_grad(set_to_none=True)
    del trainer
    lengths = setting.text.windows.lengths
    readable = [n for n in lengths if n <= setting.text.windows.longest]
    shortest = min(readable)
    longest = max(n for n in readable if n <= max(LONGEST_TIMED, shortest))
    try:
        seconds = [
            (n, seconds_a_token(model, setting.text, n, pass_tokens)) for n in (shortest, longest)
        ]
    except torch.cuda.OutOfMemoryError as error:
        raise _NoRoom("evaluation", str(error)) from None
    return Speed.of(step, setup, seconds[0], seconds[1])


def _time_training(run: PlannedRun, setting: Setting, micro: int) -> tuple[Trainer, float, float]:
    """(trainer, seconds to build it, seconds a step) with the samples and the hashing of a real run."""
    device, batches = setting.device, setting.batches[run.name]
    begun = time.perf_counter()
    trainer = Trainer(run, device, setting.attention)
    machine.synchronize(device)
    setup = time.perf_counter() - begun
    rate = run.training.optimizer.params.lr / 100
    chain = ""
    for step in range(WARM_UP):
        trainer.step(batches.rows(step), rate, micro)
    machine.synchronize(device)
    begun, done, seconds = time.perf_counter(), 0, 0.0
    while done == 0 or seconds < setting.seconds:
        for _ in range(TIMED):
            number = (WARM_UP + done) % batches.steps
            trainer.step(batches.rows(number), rate, micro)
            chain = batches.consume(chain, number)
            done += 1
        machine.synchronize(device)
        seconds = time.perf_counter() - begun
    return trainer, setup, seconds / done
