"""The same plan at a size at which two CPU cores finish in seconds: for rehearsals and tests."""

from __future__ import annotations

from dataclasses import replace

from megatron_patches.quarter.plan import Evaluation, Optimizer, PlannedRun, QuarterPlan
from megatron_patches.standalone.shape import ModelShape

LENGTHS = (32, 64, 128)
TOKENS = 4097  # held out: 32 windows of 128


def toy(plan: QuarterPlan) -> QuarterPlan:
    """Text, tokenizer, methods and schedule stay; model, lengths and batch become small."""
    evaluation = Evaluation(LENGTHS, plan.evaluation.protocols, TOKENS)
    return replace(plan, evaluation=evaluation, runs=tuple(map(_small, plan.runs)))


def _small(run: PlannedRun) -> PlannedRun:
    training = run.training
    params = replace(training.optimizer.params, lr=3e-3)
    return replace(
        run,
        parameters=_parameters(shape := _shape(run.shape)),
        shape=shape,
        training=replace(
            training,
            seq_length=LENGTHS[0],
            batch=16,
            train_iters=200,
            lr_decay_iters=200,
            optimizer=Optimizer(params),
        ),
    )


def _shape(shape: ModelShape) -> ModelShape:
    return replace(
        shape, layers=2, hidden_size=64, heads=4, intermediate_size=None, max_length=LENGTHS[0]
    )


def _parameters(shape: ModelShape) -> int:
    from megatron_patches.standalone.model import GPT

    return GPT(shape).parameter_count()
