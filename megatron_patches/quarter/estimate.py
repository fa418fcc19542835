"""What a run would do, by arithmetic alone: steps, tokens, memory, work. The run itself measures."""

from __future__ import annotations

from megatron_patches.quarter import budget
from megatron_patches.quarter.budget import flops_per_token, memory_bytes
from megatron_patches.quarter.evaluation import TOKENS_PER_PASS
from megatron_patches.quarter.plan import QuarterPlan


def lines(plan: QuarterPlan, minutes: float) -> list[str]:
    """The plan, its memory and its work; no guess of what a device reaches."""
    run = plan.runs[0]
    training, shape, lengths = run.training, run.shape, plan.evaluation.lengths
    longest = max(lengths)
    scored = (plan.evaluation.max_tokens - 1) // longest * longest
    most = min(budget.most_steps(r, plan.train.tokens) for r in plan.runs)
    gigabytes = memory_bytes(run, training.batch, max(longest, TOKENS_PER_PASS["cuda"])) / 1e9
    step = training.tokens_per_step * flops_per_token(shape, training.seq_length, training=True)
    scoring = sum(scored * flops_per_token(shape, n, training=False) for n in lengths)
    methods = len(plan.runs)
    share = budget.TRAINING_SHARE[1] * (1 - budget.SLACK)
    rate = methods * step * most / (60 * minutes * share) / 1e12
    return [
        f"study       {plan.study}: {', '.join(r.name for r in plan.runs)}",
        f"model       {shape.layers} layers, width {shape.hidden_size}, {shape.heads} heads, "
        f"vocabulary {shape.vocabulary}: {run.parameters:,} parameters",
        f"training    {training.batch} sequences of {training.seq_length} = "
        f"{training.tokens_per_step:,} tokens a step, at most {most} steps "
        f"({most * training.tokens_per_step / plan.train.tokens:.2f} passes over "
        f"{plan.train.tokens:,} tokens)",
        f"evaluation  {scored:,} tokens at each of {' '.join(map(str, lengths))}",
        f"precision   {training.precision} weights, float32 copies and position parameters",
        f"memory      about {gigabytes:.1f} GB with all sequences of a step at once (fewer where "
        "memory ends)",
        f"work        {step / 1e12:.3g} TFLOP a step, {scoring / 1e15:.3g} PFLOP of scoring a method; "
        f"all {most} steps of {methods} methods in {minutes:g} minutes need {rate:.3g} TFLOP/s "
        "and a start without compiling; fewer steps are taken on a slower device",
    ]
