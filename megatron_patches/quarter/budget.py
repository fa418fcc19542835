"""Time: what a step costs, how many steps fit, and when to stop. Arithmetic and a clock, no model."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_patches.quarter.plan import PlanError, PlannedRun
from megatron_patches.standalone.shape import ModelShape

# More passes over few tokens stop paying: up to four are nearly as good as new text (Muennighoff et
# al. 2023, "Scaling Data-Constrained Language Models", section 6).
MAX_PASSES = 4
# Fewer updates than this, the warm-up among them, leave models whose order says nothing.
FEWEST_STEPS, FEWEST_TOY_STEPS = 200, 10
SLACK = 0.11  # of the training time: under long load steps become slower than in the calibration
EVALUATION = 1.33  # times what scoring should take is kept for it
TRAINING_SHARE = (0.55, 0.85)  # least and most of what is left after the calibration
# Dense bfloat16 by NVIDIA's data sheets, FLOP/s; words of a device's name that must all be there. Other
# forms of a chip (PCIe, NVL, MIG slices, GH200) have other peaks: the words below rule them out.
PEAKS = {("H200",): 989e12, ("H100", "HBM3"): 989e12, ("A100",): 312e12}
OTHER_FORMS = {"NVL", "PCIe", "MIG"}


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
    """The data sheet's figure; None for a device that is not in `PEAKS`."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    for wanted, peak in PEAKS.items():
        if words.issuperset(wanted) and not words & OTHER_FORMS:
            return peak
    return None


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
    """One number of steps for all methods, which train one after another and are scored after that."""

    steps: int
    limit: str  # what decided the number
    training: tuple[float, ...]  # expected seconds a method, setup included
    evaluation: float  # seconds kept for the scoring of all methods
    expected_evaluation: float  # seconds that it should take

    def training_end(self, method: int, deadline: float) -> float:
        """When the training of method number `method` must be over: as late as the later ones allow.

        Only what the later methods and the scoring should take is kept from it, so all slack of the
        schedule is there for whichever method is slower than calibrated.
        """
        scoring = min(self.expected_evaluation, self.evaluation)
        return deadline - scoring - sum(self.training[method + 1 :])


def schedule(
    speeds: Sequence[Speed],
    seconds_left: float,
    lengths: Sequence[int],
    scored: int,
    most_steps: int,
    fewest_steps: int | None = None,
) -> Schedule:
    """Divide what is left after the calibration.

    The evaluation gets what it should take and a third more, within bounds; the rest, less the slack,
    is divided by what one step of all methods takes. Raises PlanError when fewer than `fewest_steps`
    (FEWEST_STEPS) fit, unless these are all that the plan wants.
    """
    fewest = FEWEST_STEPS if fewest_steps is None else fewest_steps
    expected = sum(s.scoring(scored, n) for s in speeds for n in lengths)
    least, most = TRAINING_SHARE
    share = 1 - EVALUATION * expected / max(seconds_left, 1e-9)
    training = seconds_left * min(most, max(least, share))
    setup, step = sum(s.setup for s in speeds), sum(s.step for s in speeds)
    fitting = max(0, math.floor((training * (1 - SLACK) - setup) / step))
    steps, limit = fitting, "the time left"
    if most_steps < fitting:
        steps, limit = most_steps, "the plan: its train_iters, or four passes over the text"
    if steps < min(fewest, most_steps) or steps < 1:
        # Each method's steps at this speed, with what is spent before them.
        short = (min(fewest, most_steps) * step + setup) / (1 - SLACK) / least - seconds_left
        raise PlanError(
            f"only {steps} steps a method fit into the {max(0.0, seconds_left):.0f} s left, "
            f"{step / len(speeds):.2g} s each; fewer than {fewest} say nothing: about "
            f"{max(1, math.ceil(short / 60))} --minutes more, a faster device, or --toy"
        )
    each = tuple(s.setup + steps * s.step for s in speeds)
    return Schedule(steps, limit, each, seconds_left - training, expected)


def most_steps(run: PlannedRun, tokens: int) -> int:
    """By the plan, and by `MAX_PASSES` over a text of `tokens` tokens."""
    return min(run.training.train_iters, MAX_PASSES * tokens // run.training.tokens_per_step)
