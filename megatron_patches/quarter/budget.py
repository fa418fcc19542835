"""Time: what a step costs, how many steps fit, and when to stop. Arithmetic and a clock, no model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_patches.quarter.plan import PlanError, PlannedRun
from megatron_patches.standalone.shape import ModelShape

# More passes over few tokens stop paying: up to four are nearly as good as new text (Muennighoff et
# al. 2023, "Scaling Data-Constrained Language Models", section 6).
MAX_PASSES = 4
FEWEST_STEPS = 10
SLACK = 0.06  # of the training time: steps are a little slower than the calibration's at times
TRAINING_SHARE = (0.55, 0.85)  # least and most of what is left after the calibration
# Dense bfloat16 by the makers' data sheets, FLOP/s.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}


class OutOfTime(RuntimeError):
    """The deadline has come; what is left becomes failed rows."""


@dataclass
class Clock:
    """Seconds since the command began; a test replaces `now`."""

    begun: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return time.monotonic() - self.begun


def flops_per_token(shape: ModelShape, length: int, *, training: bool) -> float:
    """Model FLOPs a token: 2 a weight of a product and 4 x width x keys / 2 of causal attention a layer,
    three times that with the backward. Embedding look-ups, norms and recomputation do not count.
    """
    width, inner = shape.hidden_size, shape.intermediate_size or 4 * shape.hidden_size
    weights = shape.layers * (4 * width * width + 2 * width * inner) + shape.vocabulary * width
    attention = shape.layers * 4 * width * length / 2
    return (2 * weights + attention) * (3 if training else 1)


def peak_flops(device_name: str) -> float | None:
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)


def memory_bytes(run: PlannedRun, micro: int, evaluated: int) -> int:
    """Rough peak: weights, gradients, moments, and the larger of a training and an evaluation pass."""
    shape, size = run.shape, 2 if run.training.precision == "bfloat16" else 4
    state = run.parameters * (size + 4 + 8 + (6 if size == 2 else 0))
    tokens = micro * run.training.seq_length
    kept = tokens * shape.hidden_size * shape.layers * 18 * size
    logits = tokens * shape.vocabulary * (size + 4 + 4 + 4)
    passing = evaluated * shape.hidden_size * 14 * size
    return state + max(kept + logits, passing)


@dataclass(frozen=True)
class Speed:
    """Measured: seconds a training step, and a scored token's seconds as `base + slope x length`."""

    step: float
    base: float
    slope: float
    setup: float  # of building the model anew

    @classmethod
    def of(
        cls, step: float, setup: float, short: tuple[int, float], long: tuple[int, float]
    ) -> Speed:
        """`short` and `long` are (length, seconds a token) of two evaluations."""
        slope = max(0.0, (long[1] - short[1]) / max(1, long[0] - short[0]))
        return cls(step, max(0.0, short[1] - slope * short[0]), slope, setup)

    def scoring(self, tokens: int, length: int) -> float:
        """Seconds to score `tokens` tokens at a length."""
        return tokens * (self.base + self.slope * length)


@dataclass(frozen=True)
class Schedule:
    """One number of steps for all methods; times in seconds a method."""

    steps: int
    limit: str  # what decided the number
    training: float  # reserved
    evaluation: float  # reserved
    expected_evaluation: float


def schedule(
    speeds: Sequence[Speed],
    seconds_left: float,
    lengths: Sequence[int],
    scored: int,
    most_steps: int,
) -> Schedule:
    """Divide what is left after the calibration.

    The evaluation gets what it should take and a third more, within bounds; the slowest method
    decides the number of steps. Raises PlanError when too few fit.
    """
    methods = len(speeds)
    expected = max(sum(s.scoring(scored, n) for n in lengths) for s in speeds)
    least, most = TRAINING_SHARE
    each = seconds_left / methods
    training = each * min(most, max(least, 1 - 1.33 * expected / each))
    slowest = max(speeds, key=lambda s: s.step)
    fitting = math.floor((training * (1 - SLACK) - max(s.setup for s in speeds)) / slowest.step)
    steps, limit = fitting, "the time left"
    if most_steps < fitting:
        steps, limit = most_steps, "the plan: its train_iters, or four passes over the text"
    if steps < FEWEST_STEPS:
        raise PlanError(
            f"only {max(0, steps)} steps of {slowest.step:.2g} s fit into the time left, fewer than "
            f"{FEWEST_STEPS}: more --minutes, a faster device, or --toy"
        )
    return Schedule(steps, limit, training, each - training, min(expected, each - training))


def most_steps(run: PlannedRun, tokens: int) -> int:
    """By the plan, and by `MAX_PASSES` over a text of `tokens` tokens."""
    return min(run.training.train_iters, MAX_PASSES * tokens // run.training.tokens_per_step)
