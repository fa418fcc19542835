"""Scoring a trained model at every length, with the standalone engine's windows and sums."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_patches.quarter import machine
from megatron_patches.quarter.budget import OutOfTime, Speed
from megatron_patches.quarter.plan import Evaluation, PlannedRun, QuarterPlan
from megatron_patches.quarter.results import Results, first_line
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.scoring import Score, score
from megatron_patches.standalone.text_bytes import bits_per_byte
from megatron_patches.standalone.windows import Plan as WindowPlan

# In one forward pass; the CPU has caches to think of.
TOKENS_PER_PASS = {"cuda": 65536, "cpu": 4096}
LONGEST_TIMED = 16384  # beyond, a calibration would cost too much; attention grows linearly by then


@dataclass(frozen=True)
class HeldOut:
    """The first tokens of the held-out split, and the windows of each length."""

    tokens: np.ndarray
    windows: WindowPlan

    @classmethod
    def of(cls, tokens: np.ndarray, asked: Evaluation) -> HeldOut:
        cut = tokens[: asked.max_tokens]
        return cls(cut, WindowPlan("position", len(cut), asked.lengths))

    @property
    def scored(self) -> int:
        """Tokens scored at a length that divides the longest."""
        return self.windows.targets // self.windows.longest * self.windows.longest

    def cut(self, plan: QuarterPlan) -> str:
        """What tells this text from other parts of the same file, as in the standalone engine's rows."""
        return f"|first {plan.evaluation.max_tokens}|aligned to {self.windows.longest}"


def passes(pass_tokens: int, length: int) -> int:
    """Windows a forward pass."""
    return max(1, pass_tokens // length)


def seconds_a_token(model: GPT, text: HeldOut, length: int, pass_tokens: int) -> float:
    """Of one full forward pass, after one that compiles."""
    windows = text.windows.windows(length)[: passes(pass_tokens, length)]
    for _ in range(2):
        found = score(model, text.tokens, windows, batch_size=len(windows))
    return found.seconds / (len(windows) * length)


@dataclass(frozen=True)
class Limits:
    """`now` and `deadline` are seconds of one clock; `pass_tokens` go through a model at once."""

    now: Callable[[], float]
    deadline: float
    pass_tokens: int


def evaluate(
    run: PlannedRun,
    model: GPT,
    length: int,
    text: HeldOut,
    plan: QuarterPlan,
    speed: Speed,
    limits: Limits,
    results: Results,
) -> None:
    """Rows of one model at one length; a length that does not fit in time is a failed row."""
    model.eval()
    device = next(model.parameters()).device
    try:
        model.position_method.can_read(length)
    except ValueError as error:
        _refuse(run, length, str(error), results)
        return
    begun = limits.now()
    machine.forget_peak(device)
    try:
        windows = text.windows.windows(length)
        size = passes(limits.pass_tokens, length)
        expected = speed.scoring(size * length, length)
        left = _Left(limits.now, limits.deadline, len(windows) * length, expected)
        left.check()
        found = score(
            model,
            text.tokens,
            windows,
            batch_size=size,
            by_position=True,
            advance=left.advance,
        )
        _record(run, length, found, plan, results)
    except Exception as error:  # a compiled kernel may raise anything; the other cells go on
        results.keep_traceback(f"{run.name} at {length}", error)
        results.fail(run, length, first_line(error), limits.now() - begun)
        return
    results.describe_length(
        run,
        length,
        seconds=found.seconds,
        tokens_per_second=found.tokens / max(found.seconds, 1e-9),
        peak_bytes=machine.peak_bytes(device),
    )


class _Left:
    """Stops a length whose next forward pass would end after the deadline."""

    def __init__(
        self, now: Callable[[], float], deadline: float, tokens: int, expected: float
    ) -> None:
        self.now, self.deadline, self.tokens, self.expected = now, deadline, tokens, expected
        self._since = time.perf_counter()

    def check(self) -> None:
        if self.now() + self.expected > self.deadline:
            raise OutOfTime(
                f"out of time: {max(0.0, self.deadline - self.now()):.0f} s left, the next forward "
                f"pass takes about {self.expected:.1f} s"
            )

    def advance(self, tokens: int) -> None:
        # What a pass took is a better guess of the next one than the calibration.
        after = time.perf_counter()
        self.expected, self._since = after - self._since, after
        self.tokens -= tokens
        if self.tokens > 0:
            self.check()


def _refuse(run: PlannedRun, length: int, message: str, results: Results) -> None:
    nothing: dict[str, Any] = {"loss": None, "perplexity": None, "bits_per_byte": None}
    nothing |= {"tokens": 0, "windows": 0, "seconds": 0.0}
    for _, protocol, _ in [c for c in results.cells_left(run) if c[2] == length]:
        results.record(run, protocol, length, **nothing, status="refused", message=message)


def _record(
    run: PlannedRun, length: int, found: Score, plan: QuarterPlan, results: Results
) -> None:
    size = dict(zip(plan.evaluation.lengths, plan.text_bytes, strict=False)).get(length)
    values: dict[str, Any] = {
        "loss": found.loss,
        "perplexity": math.exp(found.loss),
        "bits_per_byte": bits_per_byte(found.loss, found.tokens, size),
        "tokens": found.tokens,
        "windows": len(found.windows),
        "window_losses": [float(f"{value:.9g}") for value in found.windows],
        "seconds": found.seconds,
    }
    # One pass over the text serves both protocols: `position` is `nonoverlap` and its positions.
    for protocol in plan.evaluation.protocols:
        positions = found.positions if protocol == "position" else None
        results.record(run, protocol, length, **values, position_losses=positions)
