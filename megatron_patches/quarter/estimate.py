"""What a run would do on machines that are not here: steps, tokens, memory and time, by arithmetic."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megatron_patches.quarter import budget
from megatron_patches.quarter.budget import Speed, flops_per_token, memory_bytes
from megatron_patches.quarter.plan import PlanError, QuarterPlan

# Of the peak: an eager model of this width without compilation. Guesses until a run has measured them.
UTILISATION = {"training": 0.25, "evaluation": 0.30}
STARTING = 90.0  # seconds: imports, kernels to compile, checks, calibration


@dataclass(frozen=True)
class Machine:
    name: str
    flops: float  # a second, at full speed, in the run's precision


def this_cpu() -> Machine:
    """float32 products of this machine, timed for a moment."""
    a = torch.randn(768, 768)
    a @ a
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < 0.2:
        a @ a
        count += 1
    return Machine("this CPU", count * 2 * 768**3 / (time.perf_counter() - begun))


def machines() -> list[Machine]:
    return [*(Machine(name, budget.PEAKS[name]) for name in ("H200", "A100")), this_cpu()]


def lines(plan: QuarterPlan, minutes: float) -> list[str]:
    """The plan, the memory, and one line a machine."""
    run = plan.runs[0]
    training, shape = run.training, run.shape
    longest = max(plan.evaluation.lengths)
    scored = (plan.evaluation.max_tokens - 1) // longest * longest
    most = min(budget.most_steps(r, plan.train.tokens) for r in plan.runs)
    gigabytes = memory_bytes(run, training.batch, max(longest, 65536)) / 1e9
    found = [
        f"study       {plan.study}: {', '.join(r.name for r in plan.runs)}",
        f"model       {shape.layers} layers, width {shape.hidden_size}, {shape.heads} heads, "
        f"vocabulary {shape.vocabulary}: {run.parameters:,} parameters",
        f"training    {training.batch} sequences of {training.seq_length} = "
        f"{training.tokens_per_step:,} tokens a step, at most {most} steps "
        f"({most * training.tokens_per_step / plan.train.tokens:.2f} passes over "
        f"{plan.train.tokens:,} tokens)",
        f"evaluation  {scored:,} tokens at each of {' '.join(map(str, plan.evaluation.lengths))}",
        f"precision   {training.precision} weights, float32 copies and position parameters",
        f"memory      about {gigabytes:.1f} GB with all sequences of a step at once (fewer where "
        "memory ends)",
    ]
    for machine in machines():
        found.append(f"{machine.name:<11} {_on(machine, plan, minutes, scored, most)}")
    found.append(
        f"            assuming {UTILISATION['training']:.0%} of the peak in training, "
        f"{UTILISATION['evaluation']:.0%} in evaluation and {STARTING:.0f} s to start; a run measures "
        "first and plans anew"
    )
    return found


def _on(machine: Machine, plan: QuarterPlan, minutes: float, scored: int, most: int) -> str:
    run, lengths = plan.runs[0], plan.evaluation.lengths
    training, shape = run.training, run.shape
    rate = machine.flops * UTILISATION["training"]
    step = training.tokens_per_step * flops_per_token(shape, training.seq_length, training=True)
    ends = [
        (n, flops_per_token(shape, n, training=False) / machine.flops / UTILISATION["evaluation"])
        for n in (min(lengths), max(lengths))
    ]
    speed = Speed.of(step / rate, 2.0, *ends)
    starting = min(STARTING, 0.2 * 60 * minutes)
    seconds = 60 * minutes * 0.98 - starting
    evaluation = sum(speed.scoring(scored, n) for n in lengths)
    try:
        made = budget.schedule([speed] * len(plan.runs), seconds, lengths, scored, most)
    except PlanError as error:
        return f"{training.tokens_per_step / speed.step:,.0f} tokens/s: {error}"
    total = starting + len(plan.runs) * (made.steps * speed.step + 2 + evaluation)
    tokens = made.steps * training.tokens_per_step
    return (
        f"{machine.flops / 1e12:.3g} TFLOP/s peak, {training.tokens_per_step / speed.step:,.0f} "
        f"tokens/s: {made.steps} steps ({tokens / 1e6:.1f}M tokens, "
        f"{tokens / plan.train.tokens:.2f} passes) in {made.steps * speed.step:.0f} s, scored in "
        f"{evaluation:.0f} s a method; {total / 60:.1f} of {minutes:g} minutes"
    )
